"""Reads between this process's pool and its sources', from the decision to the proof of the end."""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from core.config import TransferConfig
from core.errors import HandshakeError, TransferError
from core.ids import Attempt, Incarnation, OperationId, Owner, ReadId, RequestId
from core.messages import Compatibility, Welcome
from transfer.actions import PostRead
from transfer.conversions import Portion
from transfer.extents import extents_of
from transfer.pairing import PairPlan, rank_of_source
from transfer.pump import Pump
from transfer.read_queue import EndedRead, Quantum, QueueLimits, ReadPart, ReadQueue
from transfer.staged_reads import Converter, StagedReads
from transfer.stats import ReadObservation, TransferStats
from transfer.transport import Extent, PathKind, ReadOutcome, Transport, rows_of

log = logging.getLogger(__name__)

QUANTUM_NBYTES = 2 * 2**20
"""Measured over shared memory: with less, the turns between cost a tenth of a long read."""
WARM_UP_NBYTES = 64
_TURN_S = 0.0005
"""For how long one turn posts: over shared memory the post of a quantum is its copy."""
_NUM_PEERS_AT_LIMIT = 4
"""That fill ``max_inflight_mib`` together."""


@dataclass(frozen=True, slots=True)
class ReadEnd:
    """A read is terminal: nothing of it will be written any more."""

    operation: OperationId
    peer: Incarnation
    failure: str | None = None
    """Why it went wrong; None: every byte has landed, or the read was cancelled."""
    is_damaged: bool = False
    """Every byte has landed, but they are not the source's; ``failure`` says so, too."""
    is_cancelled: bool = False
    """It ended before all of it was posted, because ``cancel`` was called."""
    nbytes: int = 0
    num_descriptors: int = 0
    duration_s: float = 0.0
    """From the decision to read to the proof of the end."""
    path: PathKind = "unknown"
    """How the bytes travelled."""


class Reads(Protocol):
    """Carries reads out. Belongs to one event loop.

    Each ``post`` is answered by exactly one ``ReadEnd``, from the loop, never from within a call.
    Reads of several requests share the link, in small parts and in turn.
    """

    @property
    def transport(self) -> str:
        """Name of what moves the bytes."""
        ...

    @property
    def sources_must_progress(self) -> bool:
        """Whether a source must be told while it is read from: nothing else wakes it."""
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

    def warm_up(self, operation: OperationId, source: Incarnation) -> None:
        """Read some bytes of ``source`` that nobody wants, so that later reads find the way ready.

        It ends as a ``post`` does.
        """
        ...

    def cancel(self, operation: OperationId) -> None:
        """Post nothing more of a read; it ends when what is posted has. Else it changes nothing."""
        ...

    def tear_down(self, source: Incarnation, reason: str) -> None:
        """End every read of ``source``; each is reported once that is proven."""
        ...

    async def drain(self, *, timeout_s: float) -> bool:
        """Post nothing more, and wait until nothing posted is outstanding.

        Returns:
            Whether that came within ``timeout_s``.
        """
        ...

    def close(self) -> None:
        """End every read; nothing is written on return. No end is reported any more."""
        ...


def queue_limits(config: TransferConfig) -> QueueLimits:
    """Return how reads share the link under ``config``."""
    total = config.max_inflight_mib * 2**20
    return QueueLimits(
        quantum_nbytes=min(QUANTUM_NBYTES, total),
        max_peer_nbytes=max(1, total // _NUM_PEERS_AT_LIMIT),
        max_total_nbytes=total,
    )


class RankReads:
    """See ``Reads``: those of one rank, whose pool is registered with ``transport``."""

    def __init__(
        self,
        transport: Transport,
        *,
        compatibility: Compatibility,
        rank: int = 0,
        scratch_offset: int,
        config: TransferConfig,
        stats: TransferStats,
        on_end: Callable[[ReadEnd], None],
        converter: Converter | None = None,
    ) -> None:
        """Begin without sources.

        Args:
            transport: Moves the bytes.
            compatibility: Of this worker.
            rank: Of this process in it.
            scratch_offset: Where ``WARM_UP_NBYTES`` of the registered memory belong to no block.
            config: Bounds and intervals.
            stats: Counts.
            on_end: Is told of each read's end, from the loop.
            converter: For sources whose blocks have another shape; without it they are refused.
        """
        self._transport = transport
        self._compatibility = compatibility
        self._rank = rank
        self._scratch_offset = scratch_offset
        self._plans: dict[Incarnation, PairPlan] = {}
        self._stats = stats
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._pump = Pump(
            transport, interval_s=config.pump_interval_s, on_outcome=self._take_outcome
        )
        self._sources: dict[OperationId, Incarnation] = {}
        """Of every read that is not terminal."""
        self._queue = ReadQueue(queue_limits(config))
        self._staged = StagedReads(
            converter, post=self._queue_portion, on_end=lambda end: self._report_ended([end])
        )
        self._posted: dict[ReadId, Quantum] = {}
        self._warm_ups: set[OperationId] = set()
        """Are no transfers: nobody counts them."""
        self._feeding: asyncio.Handle | None = None
        self._is_ending = False
        self._is_closed = False

    @property
    def transport(self) -> str:
        """See ``Reads.transport``."""
        return self._transport.name

    @property
    def sources_must_progress(self) -> bool:
        """See ``Reads.sources_must_progress``."""
        return self._transport.wake_descriptor is None

    def connect(self, source: Incarnation, welcome: Welcome) -> None:
        """See ``Reads.connect``."""
        plan = PairPlan.of(self._compatibility, welcome.compatibility, self._rank)
        if len(welcome.pools) != plan.num_source_ranks:
            raise HandshakeError(
                f"{source} has {plan.num_source_ranks} ranks and offers {len(welcome.pools)} pools "
                "(run one Sluice version on both)"
            )
        if not plan.is_direct:
            self._staged.require_room(plan)
        for share in plan.shares:
            peer = rank_of_source(source, share.source_rank)
            self._transport.connect(peer, welcome.pools[share.source_rank])
        self._plans[source] = plan

    def post(self, read: PostRead) -> None:
        """See ``Reads.post``."""
        plan = self._plans.get(read.peer)
        if plan is not None and not plan.is_direct:
            self._sources[read.operation] = read.peer
            self._staged.add(read, plan)
            return
        parts: list[ReadPart] = []
        if plan is not None:
            (share,) = plan.shares
            parts = [(rank_of_source(read.peer, share.source_rank), extents_of(read, plan.target))]
        self._begin(read.operation, read.owner, read.peer, parts)

    def warm_up(self, operation: OperationId, source: Incarnation) -> None:
        """See ``Reads.warm_up``."""
        plan = self._plans.get(source)
        shares = () if plan is None else plan.shares
        extents = rows_of([Extent(self._scratch_offset, 0, WARM_UP_NBYTES)])
        parts = [(rank_of_source(source, share.source_rank), extents) for share in shares]
        if parts:
            self._warm_ups.add(operation)
        self._begin(operation, (RequestId(f"warm-up {source}"), Attempt(1)), source, parts)

    def cancel(self, operation: OperationId) -> None:
        """See ``Reads.cancel``."""
        for posted in (operation, *self._staged.cancel(operation)):
            self._report_ended(self._queue.cancel(posted))

    def tear_down(self, source: Incarnation, reason: str) -> None:
        """See ``Reads.tear_down``."""
        plan = self._plans.pop(source, None)
        self._staged.drop(source, reason)
        for share in () if plan is None else plan.shares:
            peer = rank_of_source(source, share.source_rank)
            self._report_ended(self._queue.drop(peer, reason))
            for read_id in self._transport.tear_down(peer):
                self._pump.read_ended()
                self._report_ended(self._queue.ended(self._posted.pop(read_id), reason))
        self._feed_soon()

    async def drain(self, *, timeout_s: float) -> bool:
        """See ``Reads.drain``."""
        self._is_ending = True
        return await self._pump.drain(timeout_s=timeout_s)

    def close(self) -> None:
        """See ``Reads.close``."""
        self._is_ending = self._is_closed = True
        self._staged.close()
        self._pump.close()
        self._transport.close()

    # Posting

    def _queue_portion(self, portion: Portion) -> None:
        self._queue.add(portion.operation, portion.read.owner, portion.parts, time.monotonic())
        self._feed_soon()

    def _begin(
        self,
        operation: OperationId,
        owner: Owner,
        source: Incarnation,
        parts: Sequence[ReadPart],
    ) -> None:
        if not parts:
            self._report(ReadEnd(operation, source, f"{source} is not connected"))
            return
        self._sources[operation] = source
        self._queue.add(operation, owner, parts, time.monotonic())
        self._feed_soon()

    def _feed_soon(self) -> None:
        if self._feeding is None and self._queue.has_unposted and not self._is_ending:
            self._feeding = self._loop.call_soon(self._feed)

    def _feed(self) -> None:
        """Post for one turn; the rest in later ones, so that the loop's other work goes on."""
        self._feeding = None
        turn_ends_at = time.monotonic() + _TURN_S
        while not self._is_ending and (quantum := self._queue.next()) is not None:
            self._post_quantum(quantum)
            if time.monotonic() >= turn_ends_at:
                self._feed_soon()
                break
        self._pump.look_now()

    def _post_quantum(self, quantum: Quantum) -> None:
        began_at = time.monotonic()  # the loop's own time is that of its turn's start
        try:
            read_id = self._transport.read(quantum.peer, quantum.extents)
        except TransferError as error:
            self._report_ended(self._queue.ended(quantum, str(error)))
            self._pump.look_soon()  # the peer's other reads may have ended with it
            return
        self._stats.observe_post(time.monotonic() - began_at)
        self._posted[read_id] = quantum
        self._pump.read_posted()

    # Ends

    def _take_outcome(self, outcome: ReadOutcome) -> None:
        ended = self._queue.ended(self._posted.pop(outcome.read), outcome.failure)
        self._feed_soon()
        for end in self._but_portions(ended):
            self._tell(self._end_of(end))

    def _report_ended(self, ended: Iterable[EndedRead]) -> None:
        for end in self._but_portions(ended):
            self._report(self._end_of(end))

    def _but_portions(self, ended: Iterable[EndedRead]) -> list[EndedRead]:
        """Return the ends of reads that need no conversion; portions go on to be unpacked."""
        reads: list[EndedRead] = []
        for end in ended:
            if self._staged.is_portion(end.operation):
                self._staged.portion_ended(end)
            else:
                reads.append(end)
        return reads

    def _end_of(self, ended: EndedRead) -> ReadEnd:
        """Return what to tell, and count what has landed."""
        source = self._sources.pop(ended.operation)
        is_warm_up = ended.operation in self._warm_ups
        self._warm_ups.discard(ended.operation)
        if ended.failure is not None or ended.is_cancelled:
            return ReadEnd(
                ended.operation,
                source,
                ended.failure,
                is_damaged=ended.is_damaged,
                is_cancelled=ended.is_cancelled,
            )
        duration_s = time.monotonic() - ended.queued_at
        if not is_warm_up:
            self._stats.observe_read(
                ReadObservation(ended.nbytes, ended.num_descriptors, duration_s)
            )
        return ReadEnd(
            ended.operation,
            source,
            nbytes=ended.nbytes,
            num_descriptors=ended.num_descriptors,
            duration_s=duration_s,
            path=self._path_to(ended.peer),
        )

    def _path_to(self, peer: Incarnation) -> PathKind:
        """Return how bytes of ``peer`` travel, unless it was torn down just now."""
        is_connected = self._transport.is_connected(peer)
        return self._transport.path(peer).kind if is_connected else "unknown"

    def _report(self, end: ReadEnd) -> None:
        """Tell it from the loop: the caller may be in the middle of something."""
        self._loop.call_soon(self._tell, end)

    def _tell(self, end: ReadEnd) -> None:
        if not self._is_closed:
            self._on_end(end)
