"""The shell around the reader: channels to prefill workers, the transport, memory, deadlines."""

import asyncio
import itertools
import logging
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, Protocol

from prometheus_client import CollectorRegistry

from blockmgr.block_manager import BlockManager
from blockmgr.receive_target import ReceiveTarget
from core.channel import ChannelKeys, ClientChannel
from core.errors import PeerLostError, TransferError
from core.ids import Incarnation, OperationId, Owner, ReadId, WorkerId
from core.messages import (
    AnyMessage,
    FirstToken,
    GroupBlocks,
    Hello,
    Prefill,
    PrefillFailed,
    PrefillPeer,
    Renewed,
    Ticket,
)
from core.tasks import raise_in_loop
from decode.scheduler import DecodeScheduler
from decode.sequence import Sequence
from transfer.actions import (
    Action,
    Allocate,
    Deliver,
    Fail,
    OperationTerminal,
    PostRead,
    ReceiveStats,
    Send,
    TearDown,
)
from transfer.integrity import DigestsOf
from transfer.metrics import TransferMetrics
from transfer.pump import Pump
from transfer.reader import Reader
from transfer.transport import ReadOutcome, Transport

log = logging.getLogger(__name__)

DRAIN_TIMEOUT_S = 1.0


@dataclass(frozen=True, slots=True)
class Delivery:
    """A request's KV is here and may be trusted."""

    owner: Owner
    first_token: FirstToken
    stats: ReceiveStats
    transport: str


@dataclass(frozen=True, slots=True)
class Loss:
    """A request ends without a result."""

    owner: Owner
    reason: str
    kind: Literal["request", "capacity", "transfer", "internal"]
    peer: WorkerId | None = None
    field: str | None = None


class ReceiverOwner(Protocol):
    """What the receiver tells the worker."""

    def delivered(self, delivery: Delivery) -> None:
        """A request can decode."""
        ...

    def lost(self, loss: Loss) -> None:
        """A request's KV will not come. Its blocks are still its own."""
        ...

    def memory_changed(self) -> None:
        """Blocks may have become free."""
        ...


@dataclass(frozen=True, slots=True)
class Memory:
    """Where received KV goes: the scheduler decides when, the block manager where."""

    blocks: BlockManager
    scheduler: DecodeScheduler
    digests_of: DigestsOf
    """Of what is in the pool now."""


class _Source:
    """One life of one prefill worker."""

    def __init__(self, peer: PrefillPeer, channel: ClientChannel) -> None:
        self.worker_id = peer.worker_id
        self.incarnation = peer.incarnation
        self.channel = channel
        self.is_connected = False
        self.queued: dict[Owner, Prefill] = {}
        """Wait for the handshake."""
        self.task: asyncio.Task[None] | None = None


class Receiver:
    """Carries out what ``transfer.reader`` decides. Belongs to one event loop."""

    def __init__(
        self,
        *,
        reader: Reader,
        transport: Transport,
        pump_interval_s: float,
        keys: ChannelKeys,
        hello: Hello,
        memory: Memory,
        owner: ReceiverOwner,
        registry: CollectorRegistry,
    ) -> None:
        self._reader = reader
        self._transport = transport
        self._keys = keys
        self._hello = hello
        self._blocks = memory.blocks
        self._scheduler = memory.scheduler
        self._digests_of = memory.digests_of
        self._owner = owner
        self._clock = asyncio.get_running_loop().time
        self._pump = Pump(transport, interval_s=pump_interval_s, on_outcome=self._take_outcome)
        self._operation_ids = map(OperationId, itertools.count(1))
        self._operation_of_read: dict[ReadId, OperationId] = {}
        self._sources: dict[Incarnation, _Source] = {}
        self._deadline_may_be_new = asyncio.Event()
        self._retry_is_due = False
        self._metrics = TransferMetrics(
            reader.stats, registry, role="decode", transport=transport.name
        )
        gauge = self._metrics.gauge
        gauge("sluice_kv_transfers_in_flight", "Reads not terminal", lambda: reader.num_operations)
        gauge("sluice_kv_receiving_requests", "Being received", lambda: reader.num_receiving)
        gauge("sluice_kv_connections", "Prefill workers paired", lambda: len(self._sources))

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
        source = self._sources.get(peer.incarnation) or self._open(peer)
        if source.is_connected:
            self._ask(source, message)
        else:
            source.queued[sequence.owner] = message

    def cancel(self, owner: Owner) -> None:
        """Nobody wants ``owner`` any more; reads in progress keep their blocks until terminal."""
        for source in self._sources.values():
            source.queued.pop(owner, None)
        self._carry_out(self._reader.cancel(owner, self._clock()))

    def retry_allocations(self) -> None:
        """Memory may have become free: look again at tickets that wait for it, oldest first."""
        if not self._retry_is_due:
            self._retry_is_due = True
            asyncio.get_running_loop().call_soon(self._retry)

    async def run(self) -> None:
        """Keep the reader's deadlines until cancelled."""
        while True:
            self._deadline_may_be_new.clear()
            deadline = self._reader.next_deadline()
            wait_s = None if deadline is None else max(0.0, deadline - self._clock())
            try:
                async with asyncio.timeout(wait_s):
                    await self._deadline_may_be_new.wait()
            except TimeoutError:
                self._carry_out(self._reader.tick(self._clock()))

    async def close(self) -> None:
        """End every read and every channel; nothing writes into the pool afterwards.

        Reads in progress are let finish for a moment: over TCP, UCX aborts a source that meets
        the read request of a reader that is gone.
        """
        await self._pump.drain(timeout_s=DRAIN_TIMEOUT_S)
        for source in self._sources.values():
            if source.task is not None:
                source.task.cancel()
            source.channel.close()
        self._sources.clear()
        self._pump.close()
        self._transport.close()

    # Sources

    def _open(self, peer: PrefillPeer) -> _Source:
        channel = ClientChannel(peer.address, keys=self._keys, hello=self._hello)
        source = self._sources[peer.incarnation] = _Source(peer, channel)
        source.task = asyncio.create_task(self._converse(source), name=f"source-{peer.worker_id}")
        source.task.add_done_callback(raise_in_loop)
        return source

    async def _converse(self, source: _Source) -> None:
        """Shake hands, ask for what is queued, and take messages until the source is lost."""
        try:
            await self._shake_hands(source)
            for message in source.queued.values():
                self._ask(source, message)
            source.queued.clear()
            while True:
                self._take(source, await source.channel.receive())
        except TransferError as error:
            self._lose(source, str(error))

    async def _shake_hands(self, source: _Source) -> None:
        started = self._clock()
        welcome = await source.channel.connect()
        if welcome.incarnation != source.incarnation or not welcome.pools:
            raise PeerLostError(f"{source.worker_id} was restarted as {welcome.incarnation}")
        self._transport.connect(source.incarnation, welcome.pools[0])
        source.is_connected = True
        seconds = self._clock() - started
        self._metrics.observe_handshake(seconds)
        log.info("event=paired source=%s seconds=%.3f", source.worker_id, seconds)

    def _ask(self, source: _Source, message: Prefill) -> None:
        owner = (message.request_id, message.attempt)
        num_tokens = len(message.prompt_token_ids) + len(message.output_token_ids)
        wanted = range(message.first_token, num_tokens)
        now = self._clock()
        self._carry_out(self._reader.requested(owner, source.incarnation, now, wanted=wanted))
        source.channel.send(message)

    def _take(self, source: _Source, message: AnyMessage) -> None:
        now = self._clock()
        match message:
            case Ticket():
                self._carry_out(self._reader.ticket(message, now))
            case Renewed():
                self._carry_out(self._reader.renewed(message, source.incarnation, now))
            case PrefillFailed():
                self._carry_out(self._reader.prefill_failed(message, now))
            case _:
                log.warning("dropped=%s reason=not from prefill", type(message).__name__)

    def _lose(self, source: _Source, reason: str) -> None:
        log.warning("event=source_lost source=%s reason=%s", source.worker_id, reason)
        self._sources.pop(source.incarnation, None)
        source.channel.close()
        for owner in source.queued:
            self._owner.lost(Loss(owner, reason, "transfer", source.worker_id))
        actions = self._reader.source_lost(source.incarnation, reason, self._clock())
        self._carry_out(actions, lost=source)

    # Actions

    def _carry_out(self, actions: Iterable[Action], *, lost: _Source | None = None) -> None:
        """Carry ``actions`` out in order, and those that their answers give, after them."""
        todo = deque(actions)
        while todo:
            match todo.popleft():
                case Allocate():
                    self.retry_allocations()  # behind older ones that wait for memory
                case PostRead() as post:
                    todo.extend(self._post(post))
                case OperationTerminal(operation):
                    self._blocks.end_operation(operation)
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
                    if (source := self._sources.get(peer)) is not None:
                        source.channel.send(message)
                case TearDown(peer, reason):
                    todo.extend(self._tear_down(peer, reason))
        self._deadline_may_be_new.set()

    def _allocate(self, owner: Owner, ticket: Ticket) -> list[Action]:
        """Answer with memory, or with nothing: then ``retry_allocations`` asks again."""
        targets = [
            ReceiveTarget(named.group, named.first_index, len(named.block_ids))
            for named in ticket.blocks
        ]
        operation = next(self._operation_ids)
        placed = self._scheduler.receive(owner, targets, operation)
        if placed is None:
            return []
        local = [
            GroupBlocks(
                group=target.group,
                first_index=target.first_index,
                block_ids=tuple(block_id for block_id, _ in blocks),
                generations=tuple(generation for _, generation in blocks),
            )
            for target, blocks in zip(targets, placed, strict=True)
        ]
        return self._reader.allocated(owner, ticket.piece, local, operation, self._clock())

    def _retry(self) -> None:
        self._retry_is_due = False
        is_full = False
        for owner, ticket in self._reader.unallocated():
            sequence = self._scheduler.get(owner)
            if sequence is None or (is_full and sequence.promised_blocks is None):
                continue  # no newcomer passes an older request that waits for memory
            actions = self._allocate(owner, ticket)
            is_full = is_full or not actions
            self._carry_out(actions)

    def _post(self, post: PostRead) -> list[Action]:
        try:
            read = self._transport.read(post.peer, post.extents)
        except TransferError as error:
            return self._reader.read_failed(post.operation, str(error), self._clock())
        self._operation_of_read[read] = post.operation
        self._pump.read_posted()
        return []

    def _take_outcome(self, outcome: ReadOutcome) -> None:
        operation = self._operation_of_read.pop(outcome.read)
        now = self._clock()
        if outcome.failure is None:
            self._land(operation, now)
        else:
            log.warning("event=read_failed peer=%s reason=%s", outcome.peer, outcome.failure)
            self._carry_out(self._reader.read_failed(operation, outcome.failure, now))
        self._metrics.observe_reads()

    def _land(self, operation: OperationId, now: float) -> None:
        """Compare what has landed with what was sent, where the source tells."""
        digests = self._reader.expected_digests(operation)
        if digests is None or digests.match(self._digests_of):
            self._carry_out(self._reader.landed(operation, now))
        else:
            log.error("event=checksum_failure operation=%d", operation)
            self._carry_out(self._reader.damaged(operation, now))

    def _tear_down(self, peer: Incarnation, reason: str) -> list[Action]:
        """End the endpoint of ``peer``, which proves that its reads are over."""
        log.warning("event=tear_down peer=%s reason=%s", peer, reason)
        actions: list[Action] = []
        for read in self._transport.tear_down(peer):
            operation = self._operation_of_read.pop(read)
            self._pump.read_ended()
            actions += self._reader.read_failed(operation, reason, self._clock())
        if (source := self._sources.get(peer)) is not None:
            source.channel.close()  # its task reports the loss
        return actions

    def _deliver(self, delivery: Deliver) -> None:
        """Trust the bytes only if each block still is in the life that the read was posted for."""
        for named in delivery.blocks:
            now = tuple(map(self._blocks.generation, named.block_ids))
            if now != named.generations:
                reason = f"blocks {named.block_ids} changed hands: {named.generations} to {now}"
                self._owner.lost(Loss(delivery.owner, reason, "internal"))
                return
        self._owner.delivered(
            Delivery(delivery.owner, delivery.first_token, delivery.stats, self._transport.name)
        )
