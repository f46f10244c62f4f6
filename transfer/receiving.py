"""One request that is being received: its pieces, and when they are all there."""

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from core.config import TransferConfig
from core.ids import Incarnation, OperationId, Owner
from core.kv_layout import KVGroup, KVLayout
from core.messages import Compatibility, FirstToken, GroupBlocks, PieceId, Ticket
from transfer.actions import Deliver, Fail, ReceiveStats
from transfer.pairing import PairPlan
from transfer.positions import BlockSizes, Positions
from transfer.reader_states import PieceEvent, PieceState, State, advance_piece
from transfer.stats import FailureStage


@dataclass(frozen=True, slots=True)
class TransferShape:
    """What every whole transfer consists of."""

    num_layers: int
    """In each group."""
    sizes: BlockSizes
    layer_nbytes: int
    """Read of each layer of each block that a ticket names, by all local ranks together."""
    is_converted: bool = False
    """Whether blocks here do not become what they are there, byte by byte."""

    def max_chunks(self, tokens: range) -> int:
        """How many chunks a request for ``tokens`` may have: each but the last names a block."""
        return len(self.sizes.groups) * len(self.sizes.indices_there(tokens)) + 1

    @classmethod
    def of_equals(cls, layout: KVLayout) -> "TransferShape":
        """Return the shape of transfers from a source whose blocks are as those here."""
        return cls(
            num_layers=layout.layers_per_group,
            sizes=BlockSizes(layout.block_size, layout.block_size, layout.groups),
            layer_nbytes=layout.layer_nbytes,
        )

    @classmethod
    def of_pair(cls, mine: Compatibility, theirs: Compatibility) -> "TransferShape":
        """Return the shape of transfers from a source that has sent ``theirs``.

        Raises:
            HandshakeError: as ``PairPlan.of``.
        """
        plans = [PairPlan.of(mine, theirs, rank) for rank in range(mine.tensor_parallel_size)]
        source, target = theirs.kv_layout, mine.kv_layout
        return cls(
            num_layers=target.layers_per_group,
            sizes=BlockSizes(source.block_size, target.block_size, target.groups),
            layer_nbytes=sum(plan.wire_layer_nbytes for plan in plans),
            is_converted=not all(plan.is_direct for plan in plans),
        )

    @property
    def groups(self) -> tuple[KVGroup, ...]:
        """KV groups, the same on both sides."""
        return self.sizes.groups


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a request's KV does not come."""

    stage: FailureStage
    reason: str
    is_retryable: bool = True


@dataclass(slots=True, eq=False)
class Piece:
    """One ticket's KV on its way."""

    ticket: Ticket
    tokens: range
    """That it brings, as far as they were asked for."""
    positions: tuple[Positions, ...]
    """Of local blocks, where these tokens belong."""
    state: PieceState = PieceState.ANNOUNCED
    operation: OperationId | None = None
    """The read that fills it now, or filled it; None while ANNOUNCED."""
    targets: tuple[GroupBlocks, ...] = ()
    """Local blocks, frozen by id and generation when they were allocated."""
    landed_at: float | None = None

    @property
    def num_blocks(self) -> int:
        """Local blocks to fill."""
        return sum(run.count for run in self.positions)

    @property
    def num_source_blocks(self) -> int:
        """Blocks to read."""
        return sum(len(run.block_ids) for run in self.ticket.blocks)

    def begin_read(self, operation: OperationId, targets: tuple[GroupBlocks, ...]) -> None:
        """``operation`` fills ``targets`` from now on."""
        self.state = advance_piece(self.state, PieceEvent.ALLOCATED)
        self.operation = operation
        self.targets = targets

    def land(self, now: float) -> None:
        """Every byte is here."""
        self.state = advance_piece(self.state, PieceEvent.COMPLETED)
        self.landed_at = now

    def roll_back(self) -> None:
        """Its memory is given back."""
        self.state = advance_piece(self.state, PieceEvent.ROLLED_BACK)
        self.operation = None
        self.targets = ()
        self.landed_at = None


@dataclass(slots=True, eq=False)
class Receiving:
    """One owner's entry in the reader."""

    owner: Owner
    source: Incarnation
    shape: TransferShape
    requested_at: float
    """When ``Prefill`` was sent: the source's lease cannot have begun earlier."""
    wanted: range | None = None
    """The positions that were asked for; None: whatever the tickets name."""
    state: State = State.RECEIVING
    pieces: dict[PieceId, Piece] = field(default_factory=dict[PieceId, Piece])
    proven_until: float = 0.0
    """The source has held, or will hold, the blocks at least until here, by the reader's clock."""
    confirm_before: float | None = None
    """Deadline of CONFIRMING."""
    is_announced: bool = False
    """Whether the ticket of every piece is here; kept, since deadlines ask at every event."""
    first_read_at: float | None = None
    kv_nbytes: int = 0
    failure: Failure = Failure("protocol", "unknown")
    """Why it ends, set before an event that fails it."""

    def landed(self) -> Iterator[Piece]:
        """Pieces whose bytes are all here."""
        return (piece for piece in self.pieces.values() if piece.state is PieceState.LANDED)

    @property
    def is_proven(self) -> bool:
        """Whether every landed piece landed while the source is known to have held its blocks.

        A renewal that was sent later and acknowledged proves it for earlier landings, too: a
        lease that has once ended is never good again.
        """
        times = [piece.landed_at for piece in self.landed()]
        return all(time is not None and time < self.proven_until for time in times)

    @property
    def last_chunk(self) -> int | None:
        """Number of the last chunk, once a ticket of it is here."""
        return next((p.ticket.piece.chunk for p in self.pieces.values() if p.ticket.last), None)

    @property
    def first_token(self) -> FirstToken | None:
        """The token that prefill sampled, once its ticket is here."""
        tokens = (piece.ticket.first_token for piece in self.pieces.values())
        return next((token for token in tokens if token is not None), None)

    def is_complete(self) -> bool:
        """Whether every chunk has landed in all its layers, and nothing is still to land.

        The *set* of landed pieces decides, never their number: a piece that came twice does not
        stand for a missing one. Nor does one for another of the same layers, in other blocks.
        """
        if any(piece.state is not PieceState.LANDED for piece in self.pieces.values()):
            return False
        return covers((p.ticket.piece for p in self.landed()), self.last_chunk, self.shape)

    def deadline(self, config: TransferConfig) -> float | None:
        """Return when the request fails if nothing happens; None: it waits for memory or reads.

        Reads have timeouts of their own, and memory comes when other requests end.
        """
        if self.state is State.CONFIRMING:
            return self.confirm_before
        if self.is_announced:
            return None
        return self.requested_at + config.prefill_timeout_s

    def timeout(self, now: float) -> Failure:
        """Return what ``deadline`` means when it has passed."""
        if self.state is State.CONFIRMING:
            return Failure("lease", "the source does not confirm the lease of what has landed")
        waited_s = now - self.requested_at
        return Failure("prefill", f"tickets are missing after {waited_s:.1f} s")

    def add(self, ticket: Ticket, now: float) -> Piece:
        """Record a new piece. One that fills no block has nothing to read, and has landed."""
        tokens, end = range(ticket.num_tokens), ticket.num_tokens
        if self.wanted is not None:
            tokens, end = range(self.wanted.start, ticket.num_tokens), self.wanted.stop
        positions = self.shape.sizes.positions_of(ticket.blocks, tokens, end=end)
        piece = Piece(ticket, tokens, positions)
        self.pieces[ticket.piece] = piece
        self.proven_until = max(self.proven_until, self.requested_at + ticket.lease_s)
        if piece.num_blocks == 0:
            piece.state = PieceState.LANDED
            piece.landed_at = now
        return piece

    def deliver(self) -> Deliver:
        """Return the action that hands the request over."""
        pieces = list(self.landed())
        tickets = [piece.ticket for piece in pieces]
        token = self.first_token
        assert token is not None, "a request is delivered with its first token"
        last_landing = max(piece.landed_at or 0.0 for piece in pieces)
        return Deliver(
            owner=self.owner,
            first_token=token,
            blocks=tuple(run for piece in pieces for run in piece.targets),
            stats=ReceiveStats(
                kv_nbytes=self.kv_nbytes,
                num_tickets=len(tickets),
                num_cached_tokens=max(ticket.num_cached_tokens for ticket in tickets),
                prefill_s=max(ticket.prefill_s for ticket in tickets),
                transfer_s=0.0
                if self.first_read_at is None
                else max(0.0, last_landing - self.first_read_at),
            ),
        )

    def fail(self) -> Fail:
        """Return the action that gives the request up."""
        return Fail(self.owner, self.source, self.failure.reason, self.failure.is_retryable)


def covers(pieces: Iterable[PieceId], last_chunk: int | None, shape: TransferShape) -> bool:
    """Whether ``pieces`` hold every layer of every chunk up to ``last_chunk``."""
    if last_chunk is None:
        return False
    held = {
        (piece.chunk, layer)
        for piece in pieces
        for layer in range(piece.first_layer, piece.last_layer + 1)
    }
    if len(held) < (last_chunk + 1) * shape.num_layers:
        return False  # before anything is made of a number that a peer has named
    wanted = itertools.product(range(last_chunk + 1), range(shape.num_layers))
    return all(part in held for part in wanted)
