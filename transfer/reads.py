"""Reads between this process's pool and its sources', from the decision to the proof of the end."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from core.errors import HandshakeError, TransferError
from core.ids import Incarnation, OperationId, ReadId
from core.messages import Compatibility, Welcome
from transfer.actions import PostRead
from transfer.extents import extents_of
from transfer.pairing import PairPlan, rank_of_source
from transfer.pump import Pump
from transfer.stats import ReadObservation, TransferStats
from transfer.transport import PathKind, ReadOutcome, Transport

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ReadEnd:
    """A read is terminal: nothing of it will be written any more."""

    operation: OperationId
    peer: Incarnation
    failure: str | None = None
    """Why bytes are missing; None: every byte has landed."""
    nbytes: int = 0
    num_descriptors: int = 0
    duration_s: float = 0.0
    """From the post to the proof of the end."""
    path: PathKind = "unknown"
    """How the bytes travelled."""


class Reads(Protocol):
    """Carries reads out. Belongs to one event loop.

    Each ``post`` is answered by exactly one ``ReadEnd``, from the loop, never from within a call.
    """

    @property
    def transport(self) -> str:
        """Name of what moves the bytes."""
        ...

    def connect(self, source: Incarnation, welcome: Welcome) -> None:
        """Prepare reads from ``source``, which has sent ``welcome``.

        Raises:
            HandshakeError: its blocks cannot become ours; names what differs.
            TransferError: its pools cannot be reached.
        """
        ...

    def post(self, read: PostRead) -> None:
        """Carry out ``read``. A source that is not connected, or lost, ends it as failed."""
        ...

    def tear_down(self, source: Incarnation, reason: str) -> None:
        """End every read of ``source``; each is reported once that is proven."""
        ...

    async def drain(self, *, timeout_s: float) -> bool:
        """Wait until no read is outstanding; return whether that came within ``timeout_s``."""
        ...

    def close(self) -> None:
        """End every read; nothing is written on return. No end is reported any more."""
        ...


@dataclass(slots=True)
class _Posted:
    operation: OperationId
    source: Incarnation
    nbytes: int
    num_descriptors: int
    posted_at: float


class RankReads:
    """See ``Reads``: those of one rank, whose pool is registered with ``transport``."""

    def __init__(
        self,
        transport: Transport,
        *,
        compatibility: Compatibility,
        rank: int = 0,
        pump_interval_s: float,
        stats: TransferStats,
        on_end: Callable[[ReadEnd], None],
    ) -> None:
        self._transport = transport
        self._compatibility = compatibility
        self._rank = rank
        self._plans: dict[Incarnation, PairPlan] = {}
        self._stats = stats
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._pump = Pump(transport, interval_s=pump_interval_s, on_outcome=self._take_outcome)
        self._posted: dict[ReadId, _Posted] = {}
        self._is_closed = False

    @property
    def transport(self) -> str:
        """See ``Reads.transport``."""
        return self._transport.name

    def connect(self, source: Incarnation, welcome: Welcome) -> None:
        """See ``Reads.connect``."""
        plan = PairPlan.of(self._compatibility, welcome.compatibility, self._rank)
        if len(welcome.pools) != plan.num_source_ranks:
            raise HandshakeError(
                f"{source} has {plan.num_source_ranks} ranks and offers {len(welcome.pools)} pools "
                "(run one Sluice version on both)"
            )
        if not plan.is_direct:
            raise HandshakeError(f"{source} has blocks of another shape")
        for share in plan.shares:
            peer = rank_of_source(source, share.source_rank)
            self._transport.connect(peer, welcome.pools[share.source_rank])
        self._plans[source] = plan

    def post(self, read: PostRead) -> None:
        """See ``Reads.post``."""
        plan = self._plans.get(read.peer)
        if plan is None:
            self._report(ReadEnd(read.operation, read.peer, f"{read.peer} is not connected"))
            return
        (share,) = plan.shares
        extents = extents_of(read, plan.target)
        posted_at = self._loop.time()
        try:
            read_id = self._transport.read(rank_of_source(read.peer, share.source_rank), extents)
        except TransferError as error:
            self._report(ReadEnd(read.operation, read.peer, str(error)))
            return
        nbytes = int(extents[:, 2].sum())
        self._posted[read_id] = _Posted(read.operation, read.peer, nbytes, len(extents), posted_at)
        self._pump.read_posted()

    def tear_down(self, source: Incarnation, reason: str) -> None:
        """See ``Reads.tear_down``."""
        plan = self._plans.pop(source, None)
        for share in () if plan is None else plan.shares:
            for read_id in self._transport.tear_down(rank_of_source(source, share.source_rank)):
                posted = self._posted.pop(read_id)
                self._pump.read_ended()
                self._report(ReadEnd(posted.operation, source, reason))

    async def drain(self, *, timeout_s: float) -> bool:
        """See ``Reads.drain``."""
        return await self._pump.drain(timeout_s=timeout_s)

    def close(self) -> None:
        """See ``Reads.close``."""
        self._is_closed = True
        self._pump.close()
        self._transport.close()

    def _take_outcome(self, outcome: ReadOutcome) -> None:
        posted = self._posted.pop(outcome.read)
        if outcome.failure is not None:
            self._on_end(ReadEnd(posted.operation, posted.source, outcome.failure))
            return
        duration_s = self._loop.time() - posted.posted_at
        self._stats.observe_read(ReadObservation(posted.nbytes, posted.num_descriptors, duration_s))
        self._on_end(
            ReadEnd(
                posted.operation,
                posted.source,
                nbytes=posted.nbytes,
                num_descriptors=posted.num_descriptors,
                duration_s=duration_s,
                path=self._path_to(outcome.peer),
            )
        )

    def _path_to(self, source: Incarnation) -> PathKind:
        """Return how bytes of ``source`` travel, unless it was torn down just now."""
        is_connected = self._transport.is_connected(source)
        return self._transport.path(source).kind if is_connected else "unknown"

    def _report(self, end: ReadEnd) -> None:
        """Tell it from the loop: the caller may be in the middle of something."""
        self._loop.call_soon(self._tell, end)

    def _tell(self, end: ReadEnd) -> None:
        if not self._is_closed:
            self._on_end(end)
