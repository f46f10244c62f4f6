"""A decode worker without sockets: the real scheduler, block manager and reader."""

import itertools
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Protocol

from blockmgr.receive_target import ReceiveTarget
from core.config import SluiceConfig
from core.errors import RequestError
from core.ids import Incarnation, OperationId, Owner
from core.kv_layout import KVLayout
from core.messages import GroupBlocks, Prefill, PrefillFailed, Renewed, Ticket
from decode.scheduler import DecodeScheduler
from decode.sequence import Sequence
from engine.batch import SampledToken, StepBatch, StepOutput
from tests.property.virtual_tiers import HostMemory, VirtualMover, make_blocks
from tests.property.virtual_time import Device, Simulation
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
)
from transfer.reader import Reader
from transfer.receiving import TransferShape


class Router(Protocol):
    """What a decode worker tells."""

    def progressed(self, owner: Owner, *, is_finished: bool) -> None:
        """One more output token."""
        ...

    def lost(self, owner: Owner) -> None:
        """The KV will not come from there."""
        ...


class VirtualDecode:
    """Takes requests, messages, reads and steps as ``decode.worker`` and its receiver do."""

    def __init__(
        self,
        simulation: Simulation,
        layout: KVLayout,
        num_blocks: int,
        *,
        name: str,
        config: SluiceConfig,
        router: Router,
        send: Callable[[Incarnation, object], None],
        host: HostMemory,
    ) -> None:
        self.name = name
        self.blocks, tiers = make_blocks(
            layout, num_blocks, fences=True, name=name, num_slots=host.num_slots
        )
        self.scheduler = DecodeScheduler(
            self.blocks, layout, config.scheduler, fingerprint="model", tiers=tiers
        )
        self.mover = VirtualMover(simulation, tiers, host.storage, on_change=self._memory_changed)
        self.reader = Reader(
            layout=layout, config=config.transfer, max_quarantined_blocks=max(1, num_blocks // 2)
        )
        self._recomputes = config.transfer.load_failure == "recompute"
        self.num_recomputed = 0
        self._shape = TransferShape.of_equals(layout)
        self._simulation = simulation
        self._depth = config.scheduler.overlap_depth
        self._device = Device(simulation)
        self._num_in_flight = 0
        self._router = router
        self._send = send
        self._operations = map(OperationId, itertools.count(1))
        self._posted: dict[OperationId, Incarnation] = {}
        self._dead: set[Incarnation] = set()
        self._num_preemptions_seen = 0

    def shake_hands(self, source_block_size: int) -> None:
        """Every source has blocks of ``source_block_size`` tokens."""
        sizes = replace(self._shape.sizes, source=source_block_size)
        self._shape = replace(self._shape, sizes=sizes)

    # Requests

    def generate(self, sequence: Sequence, source: Incarnation | None) -> None:
        """Take a request; raises RequestError if it can never fit."""
        is_remote = source is not None and source not in self._dead
        self.scheduler.add(sequence, remote=is_remote)
        if source is not None and is_remote:
            now = self._simulation.now
            wanted = range(sequence.num_computed, sequence.num_tokens)
            owner = sequence.owner
            self._carry_out(
                self.reader.requested(owner, source, now, wanted=wanted, shape=self._shape)
            )
            request = Prefill(
                request_id=owner[0],
                attempt=owner[1],
                prompt_token_ids=sequence.prompt_token_ids,
                sampling=sequence.sampling,
                output_token_ids=tuple(sequence.output_token_ids),
                first_token=sequence.num_computed,
            )
            self._send(source, request)
        self.work()

    def abort(self, owner: Owner) -> None:
        """Nobody wants the rest."""
        if self.scheduler.abort(owner):
            self._carry_out(self.reader.cancel(owner, self._simulation.now))
        self._memory_changed()

    # Messages

    def take(self, source: Incarnation, message: object) -> None:
        """Take a message of a prefill worker."""
        if source in self._dead:
            return
        now = self._simulation.now
        match message:
            case Ticket():
                self._carry_out(self.reader.ticket(message, now))
            case Renewed():
                self._carry_out(self.reader.renewed(message, source, now))
            case PrefillFailed():
                self._carry_out(self.reader.prefill_failed(message, now))
            case _:
                raise AssertionError(message)
        self._memory_changed()

    def lose(self, source: Incarnation) -> None:
        """The channel to ``source`` is gone."""
        self._dead.add(source)
        self._carry_out(self.reader.source_lost(source, "killed", self._simulation.now))
        self._memory_changed()

    def tick(self) -> None:
        """Let the reader do what is due."""
        deadline = self.reader.next_deadline()
        if deadline is not None and deadline <= self._simulation.now:
            self._carry_out(self.reader.tick(self._simulation.now))
            self._memory_changed()

    # Steps

    def work(self) -> None:
        """Keep the device busy; a preemption gives tickets a chance."""
        self._keep_busy()
        self.mover.carry_out()

    def _keep_busy(self) -> None:
        while self._num_in_flight < self._depth:
            batch = self.scheduler.schedule()
            if self.scheduler.num_preemptions > self._num_preemptions_seen:
                self._num_preemptions_seen = self.scheduler.num_preemptions
                self._retry()
            if batch is None:
                return
            self._num_in_flight += 1
            self._device.run(lambda batch=batch: self._complete(batch))

    def _complete(self, batch: StepBatch) -> None:
        self._num_in_flight -= 1
        tokens = tuple(SampledToken(part.slot, 7) for part in batch.sequences if part.sample)
        for progress in self.scheduler.complete(StepOutput(batch.step, tokens, 0.0)):
            is_finished = progress.finish_reason is not None
            self._router.progressed(progress.sequence.owner, is_finished=is_finished)
        self._memory_changed()

    def _memory_changed(self) -> None:
        self._retry()
        self.work()

    # Reads

    def _carry_out(self, actions: Iterable[Action]) -> None:
        todo = deque(actions)
        while todo:
            match todo.popleft():
                case PostRead() as post:
                    todo.extend(self._post(post))
                case OperationTerminal(operation):
                    self.blocks.end_operation(operation)
                case Deliver(owner, first_token):
                    self._deliver(owner, first_token.token_id)
                case Fail(owner):
                    self._lose(owner)
                case Send(peer, message):
                    self._send(peer, message)
                case TearDown(peer, reason):
                    todo.extend(self._tear_down(peer, reason))
                case Allocate() | CancelRead():
                    pass  # every event ends with a look at all tickets; reads are posted whole

    def _lose(self, owner: Owner) -> None:
        if self._recomputes:
            self.num_recomputed += 1
            self.scheduler.recompute(owner)
        else:
            self.scheduler.lose_prefill(owner)
            self._router.lost(owner)

    def _deliver(self, owner: Owner, token_id: int) -> None:
        self.scheduler.deliver(owner, token_id)
        reason = self.scheduler.finish_delivered(owner)
        self._router.progressed(owner, is_finished=reason is not None)

    def _post(self, post: PostRead) -> list[Action]:
        if post.peer in self._dead:
            return self.reader.read_failed(post.operation, "lost", self._simulation.now)
        self._posted[post.operation] = post.peer
        self.reader.begun(post.operation, self._simulation.now)
        delay = self._simulation.rng.choice((0.0, 0.001, 0.1, 1.0)) * self._simulation.rng.random()
        self._simulation.after(delay, lambda: self._land(post.operation))
        return []

    def _land(self, operation: OperationId) -> None:
        if self._posted.pop(operation, None) is not None:
            self._carry_out(self.reader.landed(operation, self._simulation.now))
            self._memory_changed()

    def _tear_down(self, peer: Incarnation, reason: str) -> list[Action]:
        ended = [operation for operation, source in self._posted.items() if source == peer]
        actions: list[Action] = []
        for operation in ended:
            del self._posted[operation]
            actions += self.reader.read_failed(operation, reason, self._simulation.now)
        return actions

    def _retry(self) -> None:
        """See ``Receiver.retry_allocations``: oldest first, and no newcomer passes an older one."""
        is_full = False
        for owner, ticket in self.reader.unallocated():
            sequence = self.scheduler.get(owner)
            if sequence is None or (is_full and sequence.promised_blocks is None):
                continue
            actions = self._allocate(owner, ticket)
            is_full = is_full or not actions
            self._carry_out(actions)

    def _allocate(self, owner: Owner, ticket: Ticket) -> list[Action]:
        targets = [
            ReceiveTarget(run.group, run.first_index, run.count)
            for run in self.reader.positions(owner, ticket.piece)
        ]
        operation = next(self._operations)
        placed = self.scheduler.receive(owner, targets, operation)
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
        return self.reader.allocated(owner, ticket.piece, local, operation, self._simulation.now)


def is_refused(decode: VirtualDecode, sequence: Sequence, source: Incarnation | None) -> bool:
    """Hand ``sequence`` to ``decode``; return whether it can never fit there."""
    try:
        decode.generate(sequence, source)
    except RequestError:
        return True
    return False
