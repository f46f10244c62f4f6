"""The sources that this worker reads from: what is outstanding there, and when it is cut off."""

import itertools

from core.config import TransferConfig
from core.ids import Attempt, Incarnation, OperationId, Owner, RequestId
from core.messages import PieceId, Released, Renew, Renewed, Withdraw
from transfer.actions import Action, CancelRead, OperationTerminal, Send, TearDown, WarmUp
from transfer.operations import Operation, Operations, count_blocks
from transfer.source_link import SourceLink
from transfer.stats import TransferStats


class Endpoints:
    """Sources, their renewals, and every read that is not terminal.

    A read that takes too long, or too many quarantined blocks, end by tearing one source's
    endpoint down; reads of other sources go on.
    """

    def __init__(
        self, config: TransferConfig, *, max_quarantined_blocks: int, stats: TransferStats
    ) -> None:
        self._config = config
        self._max_quarantined_blocks = max_quarantined_blocks
        self._stats = stats
        self._links: dict[Incarnation, SourceLink] = {}
        self._operations = Operations()
        self._sequences = itertools.count(1)

    def __len__(self) -> int:
        """Reads that are not terminal."""
        return len(self._operations)

    @property
    def num_quarantined_blocks(self) -> int:
        """Blocks that only wait for a read to become terminal."""
        return count_blocks(each for each in self._operations.all() if each.is_quarantined)

    # Requests

    def add(self, owner: Owner, source: Incarnation, now: float) -> list[Action]:
        """A request to ``source`` begins."""
        link = self._open(source)
        link.add(owner, now)
        return self._reading_edge(link)

    def remove(self, owner: Owner, source: Incarnation) -> None:
        """The request has ended. Its source is forgotten once nothing is outstanding there."""
        link = self._links[source]
        link.remove(owner)
        self._forget_idle(link)

    def owners(self, source: Incarnation) -> tuple[Owner, ...]:
        """Return the live requests to ``source``."""
        link = self._links.get(source)
        return () if link is None else tuple(link.owners)

    def is_in_use(self, source: Incarnation) -> bool:
        """Whether a request or a read of ``source`` has not ended."""
        return source in self._links

    # Messages

    def send(self, source: Incarnation, message: Renew | Released | Withdraw) -> list[Action]:
        """Send ``message``, unless nothing leads to ``source`` any more."""
        link = self._links.get(source)
        return [] if link is not None and link.is_lost else [Send(source, message)]

    def renew(self, source: Incarnation, now: float) -> list[Action]:
        """Renew the leases of ``source`` now."""
        return self.send(source, self._links[source].renew(next(self._sequences), now))

    def acknowledge(self, message: Renewed, source: Incarnation) -> float | None:
        """Return when the renewal that ``message`` answers was sent; None: it is stale."""
        link = self._links.get(source)
        if link is None or message.incarnation != source:
            return None
        return link.acknowledge(message)

    def lose(self, source: Incarnation) -> None:
        """The channel to ``source`` is gone: nothing is sent to it any more."""
        if source in self._links:
            self._links[source].is_lost = True

    # Reads

    def begin(self, operation: Operation) -> list[Action]:
        """A read was decided: it is posted when its turn comes."""
        link = self._links[operation.peer]
        self._operations.begin(operation)
        link.operations.add(operation.operation)
        self._stats.reads_posted += 1
        return self._reading_edge(link)

    def warm_up(self, operation: OperationId, source: Incarnation) -> list[Action]:
        """A read for its own sake: what nobody waits for from the start, and fills no block."""
        link = self._open(source)
        nobody: Owner = (RequestId(f"warm-up of {source}"), Attempt(1))
        piece = PieceId(0, 0, 0)
        pending = Operation(operation, source, nobody, piece, frozenset(), nbytes=0)
        pending.is_quarantined = True
        self._operations.begin(pending)
        link.operations.add(operation)
        return [*self._reading_edge(link), WarmUp(operation, source)]

    def begun(self, operation: OperationId, now: float) -> None:
        """The first part of a read was posted: its source must end it within ``read_timeout_s``."""
        self._operations.begun(operation, now)

    def get(self, operation: OperationId) -> Operation | None:
        """Return a read that is not terminal."""
        return self._operations.get(operation)

    def end(
        self, operation: OperationId, *, failure: str | None = None
    ) -> tuple[Operation | None, list[Action]]:
        """A read is terminal. Return it, or None where it ended before or never was."""
        pending = self._operations.end(operation)
        if pending is None:
            return None, []
        link = self._links[pending.peer]
        was_torn = link.end(operation)
        actions = self._reading_edge(link)
        if pending.block_ids:
            actions.insert(0, OperationTerminal(operation))
        if failure is not None and not was_torn:
            actions += self.tear_down(pending.peer, failure)
        self._forget_idle(link)
        return pending, actions

    def quarantine(self, operation: OperationId) -> list[Action]:
        """Nobody waits for this read any more; its blocks do, but not for what is not posted."""
        self._operations.quarantine(operation)
        return [CancelRead(operation)]

    def bound_quarantine(self) -> list[Action]:
        """Tear down the peers of the oldest quarantined reads until few enough are left."""
        held = [
            pending
            for pending in self._operations.all()
            if pending.is_quarantined and not self._is_torn(pending)
        ]
        actions: list[Action] = []
        num_blocks = count_blocks(held)
        while num_blocks > self._max_quarantined_blocks:
            peer = held[0].peer
            self._stats.quarantine_alarms += 1
            actions += self.tear_down(
                peer,
                f"{num_blocks} blocks are in quarantine, {self._max_quarantined_blocks} may be",
            )
            held = [pending for pending in held if pending.peer != peer]
            num_blocks = count_blocks(held)
        return actions

    def tear_down(self, source: Incarnation, reason: str) -> list[Action]:
        """Ask for the end of every read of ``source``."""
        link = self._links.get(source)
        if link is not None:
            link.torn |= link.operations
        return [TearDown(source, reason)]

    # Time

    def next_deadline(self) -> float | None:
        """Return when ``tick`` has something to do."""
        renewals = [link.next_renew_at for link in self._links.values() if not link.is_lost]
        timeouts = [
            pending.begun_at + self._config.read_timeout_s
            for pending in self._operations.all()
            if pending.begun_at is not None and not self._is_torn(pending)
        ]
        return min((time for time in (*renewals, *timeouts) if time is not None), default=None)

    def tick(self, now: float) -> list[Action]:
        """Renew what is due, and tear down the peers of reads that take too long."""
        actions: list[Action] = [
            Send(link.incarnation, link.renew(next(self._sequences), now))
            for link in self._links.values()
            if link.is_renewal_due(now)
        ]
        for pending in self._operations.all():
            if pending.begun_at is None or self._is_torn(pending):
                continue
            waited_s = now - pending.begun_at
            if pending.begun_at + self._config.read_timeout_s <= now:
                self._stats.read_timeouts += 1
                actions += self.tear_down(
                    pending.peer, f"a read is not terminal after {waited_s:.1f} s"
                )
        return actions

    # Within

    def _open(self, source: Incarnation) -> SourceLink:
        link = self._links.get(source)
        if link is None:
            link = self._links[source] = SourceLink(source, self._config.renew_interval_s)
        if link.is_lost:
            link.reopen()
        return link

    def _is_torn(self, pending: Operation) -> bool:
        """Whether the end of this read was asked for; it comes by itself."""
        return pending.operation in self._links[pending.peer].torn

    def _reading_edge(self, link: SourceLink) -> list[Action]:
        message = link.reading_edge()
        return [] if message is None else [Send(link.incarnation, message)]

    def _forget_idle(self, link: SourceLink) -> None:
        if not link.owners and not link.operations:
            del self._links[link.incarnation]

    def check_invariants(self, reading: set[OperationId]) -> None:
        """Assert that exactly ``reading`` and the quarantined reads are outstanding."""
        for pending in self._operations.all():
            assert pending.operation in self._links[pending.peer].operations
            assert pending.is_quarantined != (pending.operation in reading), pending.operation
        assert all(link.torn <= link.operations for link in self._links.values())
        outstanding = sum(len(link.operations) for link in self._links.values())
        assert outstanding == len(self._operations), "a link has a read that does not exist"
        assert reading <= {pending.operation for pending in self._operations.all()}
