"""Reads of one rank: in quanta, in turn, converted where they must be."""

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from core.config import TransferConfig
from core.errors import HandshakeError, TransferError
from core.ids import Attempt, Incarnation, OperationId, Owner, ReadId, RequestId
from core.messages import Compatibility, Welcome
from transfer.actions import PostRead
from transfer.conversions import Portion
from transfer.extents import extents_of
from transfer.pairing import PairPlan, rank_of_source
from transfer.pump import Pump
from transfer.quanta import EndedRead, Quantum, QueueLimits, ReadPart
from transfer.read_queue import ReadQueue
from transfer.reads import ReadEnd
from transfer.staged_reads import Converter, StagedReads
from transfer.stats import TransferStats
from transfer.transport import Extent, PathKind, ReadOutcome, Transport, rows_of

QUANTUM_NBYTES: Final = 2 * 2**20
"""Measured over shared memory: with less, the turns between cost a tenth of a long read."""
LONE_QUANTUM_NBYTES: Final = 8 * 2**20
"""While one request reads alone: fewer turns, and a third of the time beside the copy."""
WARM_UP_NBYTES: Final = 64
_TURN_S = 0.0005
"""For how long one turn posts: over shared memory the post of a quantum is its copy."""
_NUM_PEERS_AT_LIMIT = 4
"""That fill ``max_inflight_mib`` together."""


def queue_limits(config: TransferConfig) -> QueueLimits:
    """Return how reads share the link under ``config``."""
    total = config.max_inflight_mib * 2**20
    return QueueLimits(
        quantum_nbytes=min(QUANTUM_NBYTES, total),
        max_peer_nbytes=max(1, total // _NUM_PEERS_AT_LIMIT),
        max_total_nbytes=total,
        lone_quantum_nbytes=LONE_QUANTUM_NBYTES,
    )


class RankReads:
    """See ``Reads``: those of one rank, whose pool is registered with ``transport``."""

    def __init__(  # noqa: PLR0913  # joins what it is made of, each by its name
        self,
        transport: Transport,
        *,
        compatibility: Compatibility,
        rank: int = 0,
        scratch_offset: int,
        config: TransferConfig,
        stats: TransferStats,
        on_end: Callable[[ReadEnd], None],
        on_begun: Callable[[OperationId], None] = lambda _: None,
        converter: Converter | None = None,
    ) -> None:
        """Begin without sources.

        Args:
            transport: Moves the bytes.
            compatibility: Of this worker.
            rank: Of this process in it.
            scratch_offset: Where ``WARM_UP_NBYTES`` of the registered memory belong to no block.
            config: Bounds and intervals.
            stats: Told how long each post took.
            on_end: Is told of each read's end, from the loop.
            on_begun: Is told once that the first part of a read was posted, from the loop.
            converter: For sources whose blocks have another shape; without it they are refused.
        """
        self._transport = transport
        self._compatibility = compatibility
        self._rank = rank
        self._scratch_offset = scratch_offset
        self._plans: dict[Incarnation, PairPlan] = {}
        self._stats = stats
        self._on_end = on_end
        self._on_begun = on_begun
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
        self._waiting: set[OperationId] = set()
        """Reads that have not begun."""
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
        self._connect_ranks(source, plan, welcome)
        if not plan.is_direct:
            self._staged.connect(source, plan)
        self._plans[source] = plan

    def post(self, read: PostRead) -> None:
        """See ``Reads.post``."""
        plan = self._plan_to_read(read.operation, read.peer)
        if plan is None:
            return
        if plan.is_direct:
            (share,) = plan.shares
            peer = rank_of_source(read.peer, share.source_rank)
            self._enqueue(read.operation, read.owner, [(peer, extents_of(read, plan.target))])
        else:
            self._staged.add(read, plan)

    def warm_up(self, operation: OperationId, source: Incarnation) -> None:
        """See ``Reads.warm_up``."""
        plan = self._plan_to_read(operation, source)
        if plan is None:
            return
        nobody: Owner = (RequestId(f"warm-up {source}"), Attempt(1))
        extents = rows_of([Extent(self._scratch_offset, 0, WARM_UP_NBYTES)])
        peers = (rank_of_source(source, share.source_rank) for share in plan.shares)
        self._enqueue(operation, nobody, [(peer, extents) for peer in peers])

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

    def _connect_ranks(self, source: Incarnation, plan: PairPlan, welcome: Welcome) -> None:
        """Connect each rank of ``source`` that is read, or none."""
        peers: list[Incarnation] = []
        try:
            for share in plan.shares:
                peer = rank_of_source(source, share.source_rank)
                self._transport.connect(peer, welcome.pools[share.source_rank])
                peers.append(peer)
        except TransferError:
            for peer in peers:
                self._transport.tear_down(peer)  # nothing was read there
            raise

    def _plan_to_read(self, operation: OperationId, source: Incarnation) -> PairPlan | None:
        """Take ``operation`` on and return its plan; None: it has failed, and that is told."""
        plan = self._plans.get(source)
        if plan is None or self._is_ending:
            reason = f"{source} is not connected" if plan is None else "this worker is ending"
            self._report(ReadEnd(operation, source, reason))
            return None
        self._sources[operation] = source
        self._waiting.add(operation)
        return plan

    def _queue_portion(self, portion: Portion) -> None:
        self._enqueue(portion.operation, portion.read.owner, portion.parts)

    def _enqueue(self, operation: OperationId, owner: Owner, parts: Sequence[ReadPart]) -> None:
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
        for operation in map(self._staged.read_of, quantum.operations):
            if operation in self._waiting:
                self._waiting.remove(operation)
                self._on_begun(operation)

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
        source = self._sources.pop(ended.operation)
        self._waiting.discard(ended.operation)
        if ended.failure is not None or ended.is_cancelled:
            return ReadEnd(
                ended.operation,
                source,
                ended.failure,
                is_damaged=ended.is_damaged,
                is_cancelled=ended.is_cancelled,
            )
        return ReadEnd(
            ended.operation,
            source,
            nbytes=ended.nbytes,
            num_descriptors=ended.num_descriptors,
            duration_s=time.monotonic() - ended.queued_at,
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
