"""The shell around the reader: channels to prefill workers, reads, memory, deadlines."""

import asyncio
import itertools
import logging
from collections import deque
from collections.abc import Callable, Hashable, Iterable

from prometheus_client import CollectorRegistry

from core.deadlines import keep_deadlines
from core.errors import HandshakeError
from core.ids import Incarnation, OperationId, Owner
from core.messages import (
    AnyMessage,
    Compatibility,
    Peers,
    Prefill,
    PrefillFailed,
    PrefillPeer,
    Reading,
    Renewed,
    Ticket,
    Welcome,
)
from decode.delivery import Delivery, Loss, ReceiverOwner
from decode.landing import Landing, Memory
from decode.sequence import Sequence
from decode.sources import Source, Sources, level_of_loss
from decode.tracing import DecodeTrace
from transfer.actions import (
    Action,
    Allocate,
    CancelRead,
    Deliver,
    Fail,
    OperationTerminal,
    PostRead,
    Send,
    TearDown,
    WarmUp,
)
from transfer.metrics import TransferMetrics
from transfer.reader import Reader
from transfer.reads import ReadEnd, Reads
from transfer.receiving import TransferShape
from transfer.stats import ReadObservation

log = logging.getLogger(__name__)

DRAIN_TIMEOUT_S = 1.0


class Receiver:
    """Carries out what ``transfer.reader`` decides. Belongs to one event loop."""

    def __init__(
        self,
        *,
        reader: Reader,
        compatibility: Compatibility,
        open_reads: Callable[
            [Callable[[ReadEnd], None], Callable[[OperationId], None]],
            Reads,
        ],
        open_sources: Callable[["Receiver"], Sources],
        memory: Memory,
        owner: ReceiverOwner,
        registry: CollectorRegistry,
        trace: DecodeTrace,
    ) -> None:
        """Begin without sources.

        Args:
            reader: Decides.
            compatibility: Of this worker.
            open_reads: Makes what carries reads out, given who is told of their ends, and who of
                their beginnings.
            open_sources: Makes the channels, given who is told of what they bring.
            memory: Where KV goes.
            owner: Is told of requests that were delivered or lost.
            registry: Of metrics.
            trace: Of each request.
        """
        self._reader = reader
        self._compatibility = compatibility
        self._shapes: dict[Incarnation, TransferShape] = {}
        self._landing = Landing(memory, trace)
        self._owner = owner
        self._trace = trace
        self._clock = asyncio.get_running_loop().time
        self._reads = open_reads(self._take_end, self._take_begun)
        self._sources = open_sources(self)
        self._operation_ids = map(OperationId, itertools.count(1))
        self._deadline_may_be_new = asyncio.Event()
        self._retry_is_due = False
        self._warm_ups: dict[OperationId, Incarnation] = {}
        self._metrics = TransferMetrics(
            reader.stats, registry, role="decode", transport=self._reads.transport
        )
        gauge = self._metrics.gauge
        self._metrics.in_flight(lambda: reader.num_operations)
        gauge("sluice_kv_receiving_requests", "Being received", lambda: reader.num_receiving)
        sources = self._sources
        self._metrics.gauge_by_state(
            "sluice_kv_connections",
            "Prefill workers, by whether they have taken us",
            {
                "connected": lambda: sources.num_connected,
                "connecting": lambda: len(sources) - sources.num_connected,
            },
        )

    @property
    def transport(self) -> str:
        """Name of what moves the bytes."""
        return self._reads.transport

    def request(self, sequence: Sequence, peer: PrefillPeer) -> None:
        """Ask ``peer`` for the KV of ``sequence`` behind the prefix that is here already."""
        message = Prefill(
            request_id=sequence.owner[0],
            attempt=sequence.owner[1],
            prompt_token_ids=sequence.prompt_token_ids,
            sampling=sequence.sampling,
            output_token_ids=tuple(sequence.output_token_ids),
            first_token=sequence.num_computed,
            cache_salt=sequence.cache_salt,
        )
        self._sources.ask(peer, message)

    def announced(self, router: Hashable, peers: Peers) -> None:
        """``router`` knows these prefill workers: the first request to one finds it ready."""
        self._sources.announced(router, peers.prefill)

    def router_lost(self, router: Hashable) -> None:
        """``router`` is gone, for now."""
        self._sources.router_lost(router)

    def cancel(self, owner: Owner) -> None:
        """Nobody wants ``owner`` any more; reads in progress keep their blocks until terminal."""
        self._sources.withdraw(owner)
        self._carry_out(self._reader.cancel(owner, self._clock()))

    def retry_allocations(self) -> None:
        """Memory may have become free: look again at tickets that wait for it, oldest first."""
        if not self._retry_is_due:
            self._retry_is_due = True
            asyncio.get_running_loop().call_soon(self._retry)

    async def run(self) -> None:
        """Keep the reader's deadlines until cancelled."""
        await keep_deadlines(self._reader.next_deadline, self._deadline_may_be_new, self._tick)

    def _tick(self, now: float) -> None:
        self._carry_out(self._reader.tick(now))

    async def close(self) -> None:
        """End every request, read and channel; nothing writes into the pool afterwards.

        What is posted of reads in progress is let finish for a moment: a source that serves them
        may not survive a reader that goes away in their middle.
        """
        for owner in self._reader.owners():
            self.cancel(owner)
        await self._reads.drain(timeout_s=DRAIN_TIMEOUT_S)
        self._sources.close()
        self._reads.close()

    # What the channels bring

    def paired(self, source: Source, welcome: Welcome, *, seconds: float) -> None:
        """See ``SourcesOwner``."""
        self._reads.connect(source.incarnation, welcome)
        if welcome.compatibility is None:
            raise HandshakeError(f"{source.worker_id} does not say what its blocks look like")
        shape = TransferShape.of_pair(self._compatibility, welcome.compatibility)
        self._shapes[source.incarnation] = shape
        self._metrics.observe_handshake(seconds)
        self._metrics.observe_path(source.incarnation, "unknown")
        operation = next(self._operation_ids)
        self._warm_ups[operation] = source.incarnation
        self._carry_out(self._reader.warm_up(operation, source.incarnation))

    def is_in_use(self, incarnation: Incarnation) -> bool:
        """See ``SourcesOwner``."""
        return self._reader.is_in_use(incarnation)

    def asking(self, source: Source, message: Prefill) -> None:
        """See ``SourcesOwner``."""
        self._trace.asked(message, source.worker_id)
        owner = (message.request_id, message.attempt)
        num_tokens = len(message.prompt_token_ids) + len(message.output_token_ids)
        wanted = range(message.first_token, num_tokens)
        now = self._clock()
        shape = self._shapes[source.incarnation]
        self._carry_out(
            self._reader.requested(owner, source.incarnation, now, wanted=wanted, shape=shape)
        )

    def received(self, source: Source, message: AnyMessage) -> None:
        """See ``SourcesOwner``."""
        now = self._clock()
        match message:
            case Ticket() | PrefillFailed() if message.incarnation != source.incarnation:
                log.warning("dropped=%s reason=another source's", type(message).__name__)
            case Ticket():
                self._trace.ticket(message)
                self._carry_out(self._reader.ticket(message, now))
            case Renewed():
                self._trace.renewed(message)
                self._carry_out(self._reader.renewed(message, source.incarnation, now))
            case PrefillFailed():
                self._carry_out(self._reader.prefill_failed(message, now))
            case _:
                log.warning("dropped=%s reason=not from prefill", type(message).__name__)

    def refused(self, owner: Owner, peer: PrefillPeer, reason: str) -> None:
        """See ``SourcesOwner``."""
        self._reader.stats.failures["handshake"] += 1
        self._owner.lost(Loss(owner, reason, "transfer", peer.worker_id))

    def lost(self, source: Source, reason: str) -> None:
        """See ``SourcesOwner``."""
        self._metrics.forget_peer(source.incarnation)
        self._reader.stats.failures["handshake"] += len(source.queued)
        for owner in source.queued:
            self._owner.lost(Loss(owner, reason, "transfer", source.worker_id))
        actions = self._reader.source_lost(source.incarnation, reason, self._clock())
        self._carry_out(actions, lost=source)
        self._shapes.pop(source.incarnation, None)

    # Actions

    def _carry_out(self, actions: Iterable[Action], *, lost: Source | None = None) -> None:
        """Carry ``actions`` out in order, and those that their answers give, after them."""
        todo = deque(actions)
        while todo:
            match todo.popleft():
                case Allocate():
                    self.retry_allocations()  # behind older ones that wait for memory
                case PostRead() | WarmUp() | CancelRead() as action:
                    self._carry_to_reads(action)
                case OperationTerminal(operation):
                    self._landing.end(operation)
                    self._owner.memory_changed()
                    self.retry_allocations()
                case Deliver() as delivery:
                    self._deliver(delivery)
                case Fail(owner, peer, reason, is_retryable):
                    source = self._sources.get(peer) or lost
                    worker_id = source.worker_id if source else None
                    kind = "transfer" if is_retryable else "internal"
                    self._owner.lost(Loss(owner, reason, kind, worker_id))
                case Send(peer, message):
                    self._send(peer, message)
                case TearDown(peer, reason):
                    self._tear_down(peer, reason)
        self._deadline_may_be_new.set()
        self._sources.close_left()

    def _carry_to_reads(self, action: PostRead | WarmUp | CancelRead) -> None:
        match action:
            case PostRead():
                self._trace.posting(action)
                self._reads.post(action)
            case WarmUp(operation, peer):
                self._reads.warm_up(operation, peer)
            case CancelRead(operation):
                self._reads.cancel(operation)

    def _send(self, peer: Incarnation, message: AnyMessage) -> None:
        """Send ``message``, if anything leads there and it is of use."""
        if isinstance(message, Reading) and not self._reads.sources_must_progress:
            return
        if (source := self._sources.get(peer)) is not None:
            source.channel.send(message)

    def _allocate(self, owner: Owner, ticket: Ticket) -> list[Action]:
        """Answer with memory, or with nothing: then ``retry_allocations`` asks again."""
        operation = next(self._operation_ids)
        positions = self._reader.positions(owner, ticket.piece)
        blocks = self._landing.place(owner, ticket, positions, operation)
        if blocks is None:
            return []
        return self._reader.allocated(owner, ticket.piece, blocks, operation, self._clock())

    def _retry(self) -> None:
        self._retry_is_due = False
        is_full = False
        for owner, ticket in self._reader.unallocated():
            if not self._landing.may_place(owner, is_full=is_full):
                continue
            actions = self._allocate(owner, ticket)
            is_full = is_full or not actions
            self._carry_out(actions)

    def _take_begun(self, operation: OperationId) -> None:
        self._reader.begun(operation, self._clock())
        self._deadline_may_be_new.set()

    def _take_end(self, end: ReadEnd) -> None:
        source = self._warm_ups.pop(end.operation, None)
        if source is None:
            self._take_read(end)
        elif end.failure is None:
            self._sources.warmed(source)
            self._metrics.observe_path(end.peer, end.path)
            self._carry_out(self._reader.landed(end.operation, self._clock()))
        else:
            log.warning("event=warm_up_failed peer=%s reason=%s", end.peer, end.failure)
            self._carry_out(self._reader.read_failed(end.operation, end.failure, self._clock()))

    def _take_read(self, end: ReadEnd) -> None:
        self._trace.read_ended(end)
        now = self._clock()
        if end.is_cancelled:
            self._carry_out(self._reader.read_cancelled(end.operation))
        elif end.failure is None:
            self._metrics.observe_path(end.peer, end.path)
            self._reader.stats.observe_read(
                ReadObservation(end.nbytes, end.num_descriptors, end.duration_s)
            )
            self._land(end.operation, now)
        elif end.is_damaged:
            self._damaged(end.operation, now)
        else:
            log.warning("event=read_failed peer=%s reason=%s", end.peer, end.failure)
            self._carry_out(self._reader.read_failed(end.operation, end.failure, now))
        self._metrics.observe_reads()

    def _land(self, operation: OperationId, now: float) -> None:
        """Compare what has landed with what was sent, where the source tells."""
        if self._landing.is_intact(self._reader.expected_digests(operation)):
            self._carry_out(self._reader.landed(operation, now))
        else:
            self._damaged(operation, now)

    def _damaged(self, operation: OperationId, now: float) -> None:
        log.error("event=checksum_failure operation=%d", operation)
        self._carry_out(self._reader.damaged(operation, now))

    def _tear_down(self, peer: Incarnation, reason: str) -> None:
        """End the endpoint of ``peer``, which proves that its reads are over."""
        if peer in self._shapes:  # else it was never paired: there is nothing to tell
            log.log(level_of_loss(reason), "event=tear_down peer=%s reason=%s", peer, reason)
        self._reads.tear_down(peer, reason)
        if (source := self._sources.get(peer)) is not None:
            source.channel.close()  # its task reports the loss

    def _deliver(self, delivery: Deliver) -> None:
        """Hand a request over, unless its blocks changed hands."""
        fault = self._landing.fault_of(delivery)
        if fault is not None:
            self._owner.lost(Loss(delivery.owner, fault, "internal"))
            return
        self._trace.delivered(delivery)
        self._owner.delivered(
            Delivery(delivery.owner, delivery.first_token, delivery.stats, self._reads.transport)
        )
