"""The decode side of a transfer: from a request to prefill until its KV may be trusted.

Pure: time and events come in, actions go out. The worker carries every action out, in order, and
answers where the action says so. All times are of the caller's one monotonic clock.
"""

from collections.abc import Sequence

from core.config import TransferConfig
from core.errors import InternalError
from core.ids import Incarnation, OperationId, Owner
from core.kv_layout import KVLayout
from core.messages import GroupBlocks, PieceId, PrefillFailed, Renewed, Ticket
from transfer.actions import Action, Allocate, OperationTerminal, PostRead
from transfer.endpoints import Endpoints
from transfer.extents import describe_places
from transfer.integrity import Digests
from transfer.operations import Operation
from transfer.positions import Positions
from transfer.read_results import ReadResults
from transfer.reader_states import Event, PieceState, State
from transfer.receiving import Failure, Receiving, TransferShape, covers
from transfer.receptions import Receptions
from transfer.stats import TransferStats
from transfer.ticket_faults import fault_of, gap_in


class Reader:
    """Every request that this worker receives, and every read that is not terminal.

    A request ends at once, by delivery, failure or ``cancel``; its reads end when they are
    terminal. A read whose request is gone is *quarantined*: its blocks wait for it.

    Invariants (``check_invariants``):
        * a piece is READING if and only if a read that is not terminal and not quarantined fills
          it;
        * an owner that has ended has no entry, and its source does not renew it;
        * each ``allocated`` is answered by exactly one ``OperationTerminal``.
    """

    def __init__(
        self,
        *,
        layout: KVLayout,
        config: TransferConfig,
        max_quarantined_blocks: int,
    ) -> None:
        """Begin with nothing.

        Args:
            layout: Of the local pool.
            config: Lease, timeouts, intervals.
            max_quarantined_blocks: Above this, the peer of the oldest quarantined read is torn
                down.
        """
        self._shape = TransferShape.of_equals(layout)
        self.stats = TransferStats()
        self._endpoints = Endpoints(
            config, max_quarantined_blocks=max_quarantined_blocks, stats=self.stats
        )
        self._requests = Receptions(config, self._endpoints, self.stats)
        self._results = ReadResults(layout, self._endpoints, self._requests, self.stats)

    # Reading

    @property
    def num_receiving(self) -> int:
        """Requests that have not ended."""
        return len(self._requests)

    @property
    def num_operations(self) -> int:
        """Reads that are not terminal, the quarantined included."""
        return len(self._endpoints)

    @property
    def num_quarantined_blocks(self) -> int:
        """Blocks that only wait for a read to become terminal."""
        return self._endpoints.num_quarantined_blocks

    def is_receiving(self, owner: Owner) -> bool:
        """Whether ``owner`` has not ended."""
        return owner in self._requests

    def owners(self) -> tuple[Owner, ...]:
        """Return the requests that have not ended."""
        return tuple(entry.owner for entry in self._requests.all())

    def is_in_use(self, source: Incarnation) -> bool:
        """Whether a request to ``source`` or a read from there has not ended."""
        return self._endpoints.is_in_use(source)

    def unallocated(self) -> list[tuple[Owner, Ticket]]:
        """Return the tickets that wait for memory, oldest request first."""
        return [
            (entry.owner, piece.ticket)
            for entry in self._requests.all()
            for piece in entry.pieces.values()
            if piece.state is PieceState.ANNOUNCED
        ]

    def next_deadline(self) -> float | None:
        """Return when ``tick`` has something to do, if nothing happens before."""
        deadlines = (self._endpoints.next_deadline(), self._requests.next_deadline())
        return min((time for time in deadlines if time is not None), default=None)

    def check_invariants(self) -> None:
        """Assert the invariants above: O(n), for tests and for an idle worker."""
        self._endpoints.check_invariants(self._requests.check_invariants())

    # Requests

    def requested(
        self,
        owner: Owner,
        source: Incarnation,
        now: float,
        *,
        wanted: range | None = None,
        shape: TransferShape | None = None,
    ) -> list[Action]:
        """``Prefill`` is about to be sent to ``source``. Tickets of ``owner`` are expected now.

        ``now`` must not be later than the sending: the lease is counted from it. ``wanted`` are the
        positions that were asked for, from a block's first on: tickets must cover these, and no
        others. None takes what the tickets say. ``shape`` is that of the pair; None: the source's
        blocks are as those here.

        Raises:
            InvalidTransitionError: ``owner`` is being received already.
        """
        entry = Receiving(owner, source, shape or self._shape, requested_at=now, wanted=wanted)
        return self._requests.begin(entry)

    def cancel(self, owner: Owner, now: float) -> list[Action]:
        """Nobody wants ``owner`` any more: it is gone on return. Unknown owners change nothing.

        That is no proof that its reads are over: their blocks wait for ``OperationTerminal``.
        """
        entry = self._requests.get(owner)
        return [] if entry is None else self._requests.apply(entry, Event.CANCELLED, now)

    def roll_back(self, owner: Owner, now: float) -> list[Action]:
        """Give the memory of ``owner`` back; its source still holds the KV, to be read again.

        On return its tickets are ``unallocated`` again. Unknown owners change nothing.
        """
        entry = self._requests.get(owner)
        if entry is None:
            return []
        self.stats.rollbacks += 1
        cancelled: list[Action] = []
        for piece in entry.pieces.values():
            if piece.num_blocks:
                cancelled += self._requests.abandon(piece)
                piece.roll_back()
        return [
            *cancelled,
            *self._requests.apply(entry, Event.ROLLED_BACK, now),
            *self._endpoints.bound_quarantine(),
        ]

    # Messages

    def ticket(self, message: Ticket, now: float) -> list[Action]:
        """A source offers a piece."""
        entry = self._requests.expect(
            (message.request_id, message.attempt), message.incarnation, "ticket"
        )
        if entry is None:
            return []
        known = entry.pieces.get(message.piece)
        if known is not None and known.ticket.blocks == message.blocks:
            self.stats.stale["duplicate_ticket"] += 1
            return []
        fault = fault_of(message, entry)
        if fault is not None:
            return self._requests.fail(entry, Failure("protocol", fault), now)
        self.stats.lease_events["granted"] += 1
        piece = entry.add(message, now)
        entry.is_announced = covers(entry.pieces, entry.last_chunk, entry.shape)
        gap = gap_in(entry)
        if gap is not None:
            return self._requests.fail(entry, Failure("protocol", gap), now)
        if piece.state is PieceState.LANDED:
            return self._requests.settle(entry, now)
        return [Allocate(entry.owner, message)]

    def renewed(self, message: Renewed, source: Incarnation, now: float) -> list[Action]:
        """A source tells which leases it has extended, and which are void."""
        sent_at = self._endpoints.acknowledge(message, source)
        actions: list[Action] = []
        if sent_at is None:
            self.stats.stale["renewed"] += 1
        else:
            actions += self._proven(message, source, sent_at, now)
        # What is void is so for good, whichever question was answered, or none.
        voided = message.void if message.incarnation == source else ()
        for entry in self._requests.of_source(source, voided):
            self.stats.lease_events["voided"] += 1
            actions += self._requests.fail(
                entry, Failure("lease", "the source's lease is void"), now
            )
        return actions

    def _proven(
        self, message: Renewed, source: Incarnation, sent_at: float, now: float
    ) -> list[Action]:
        """The leases in ``message`` are good for so long from ``sent_at``."""
        actions: list[Action] = []
        for entry in self._requests.of_source(source, message.requests):
            entry.proven_until = max(entry.proven_until, sent_at + message.lease_s)
            self.stats.lease_events["renewed"] += 1
            if entry.state is State.CONFIRMING:
                actions += self._requests.settle(entry, now)
        return actions

    def prefill_failed(self, message: PrefillFailed, now: float) -> list[Action]:
        """The source gave up; what it offered before is void."""
        owner = (message.request_id, message.attempt)
        entry = self._requests.expect(owner, message.incarnation, "prefill_failed")
        if entry is None:
            return []
        reason = f"prefill failed: {message.reason}"
        return self._requests.fail(entry, Failure("prefill", reason, message.retryable), now)

    def source_lost(self, source: Incarnation, reason: str, now: float) -> list[Action]:
        """The channel to ``source`` is gone: its requests fail, and its endpoint is torn down."""
        self._endpoints.lose(source)
        actions = self._endpoints.tear_down(source, reason)
        for entry in self._requests.of_source(source, self._endpoints.owners(source)):
            entry.failure = Failure("peer", f"prefill worker lost: {reason}")
            actions += self._requests.apply(entry, Event.SOURCE_LOST, now)
        return actions

    # Memory and reads

    def positions(self, owner: Owner, piece_id: PieceId) -> tuple[Positions, ...]:
        """Return where local blocks are needed for a ticket that is ``unallocated``."""
        entry = self._requests.get(owner)
        piece = None if entry is None else entry.pieces.get(piece_id)
        return () if piece is None else piece.positions

    def allocated(
        self,
        owner: Owner,
        piece_id: PieceId,
        targets: Sequence[GroupBlocks],
        operation: OperationId,
        now: float,
    ) -> list[Action]:
        """``targets`` are RECEIVING for ``operation``, and are at exactly its ``positions``.

        Raises:
            InternalError: they do not, or the piece has memory already. Nothing changed.
        """
        entry = self._requests.get(owner)
        piece = None if entry is None else entry.pieces.get(piece_id)
        if entry is None or piece is None:
            self.stats.stale["allocation"] += 1
            return [OperationTerminal(operation)]
        target = tuple(targets)
        if piece.positions != tuple(
            Positions(run.group, run.first_index, len(run.block_ids)) for run in target
        ):
            needed = ", ".join(map(str, piece.positions))
            raise InternalError(
                f"ticket covers {needed}, memory was allocated for {describe_places(target)}"
            )
        piece.begin_read(operation, target)
        if entry.first_read_at is None:
            entry.first_read_at = now
        num_layers = piece_id.last_layer - piece_id.first_layer + 1
        begun = self._endpoints.begin(
            Operation(
                operation=operation,
                peer=entry.source,
                owner=owner,
                piece=piece_id,
                block_ids=frozenset(block_id for run in target for block_id in run.block_ids),
                nbytes=piece.num_source_blocks * num_layers * entry.shape.layer_nbytes,
            )
        )
        read = PostRead(
            operation,
            entry.source,
            owner,
            piece_id,
            source=piece.ticket.blocks,
            target=target,
            first_token=piece.tokens.start,
            end_token=piece.tokens.stop,
        )
        return [*begun, read]

    def begun(self, operation: OperationId, now: float) -> None:
        """The first part of a read was posted: from now on its source is held to its timeout."""
        self._endpoints.begun(operation, now)

    def warm_up(self, operation: OperationId, source: Incarnation) -> list[Action]:
        """``source`` was paired: read something, so that its first request finds the way ready."""
        return self._endpoints.warm_up(operation, source)

    def landed(self, operation: OperationId, now: float) -> list[Action]:
        """Every byte of the read is in the pool."""
        return self._results.landed(operation, now)

    def expected_digests(self, operation: OperationId) -> Digests | None:
        """Return what the blocks that a pending read fills must hold once it has landed.

        None where the source computed no digests, nobody waits for the read any more, or it was
        converted: then it was compared as it was staged, and a ``damaged`` tells.
        """
        return self._results.expected_digests(operation)

    def damaged(self, operation: OperationId, now: float) -> list[Action]:
        """Every byte of the read is in the pool, but they are not what the source has.

        Says nothing about the source's other reads. The request fails, as a whole.
        """
        return self._results.damaged(operation, now)

    def read_cancelled(self, operation: OperationId) -> list[Action]:
        """The read is terminal, and was not posted wholly, as ``CancelRead`` has asked.

        Raises:
            InternalError: somebody waits for it.
        """
        return self._results.cancelled(operation)

    def read_failed(self, operation: OperationId, reason: str, now: float) -> list[Action]:
        """The read is terminal without all its bytes; none will be written any more.

        The transport has lost its peer: where no tear-down was asked for, one is now, so that the
        worker pairs with the source anew.
        """
        return self._results.failed(operation, reason, now)

    # Time

    def tick(self, now: float) -> list[Action]:
        """Do what is due: renewals, timeouts of reads, of tickets and of confirmations."""
        return [*self._endpoints.tick(now), *self._requests.tick(now)]
