"""Carries out what the tiers' book decides: copies on a thread, storage calls on the event loop."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Protocol

from core.errors import StepFailedError
from core.ids import BlockId, OperationId
from core.tasks import raise_in_loop
from core.tiers import CopyIn, CopyOut, Find, HostSlot, MarkEpoch, Read, Tier, TierAction, Write
from transfer.tiers.copy_thread import CopyThread
from transfer.tiers.metrics import MoveMetrics
from transfer.tiers.storage_tier import StorageTier

log = logging.getLogger(__name__)


class TierMemory(Protocol):
    """The pool's bytes and those of host memory. Each copy is over when the call returns."""

    def view(self, slot: HostSlot) -> memoryview:
        """Return the bytes of ``slot`` in place."""
        ...

    def store(self, block_ids: Sequence[BlockId], slots: Sequence[HostSlot]) -> None:
        """Copy blocks into slots."""
        ...

    def load(self, slots: Sequence[HostSlot], block_ids: Sequence[BlockId]) -> None:
        """Copy slots into blocks."""
        ...


class TierEvents(Protocol):
    """Who decides. Every action is answered exactly once, but see ``marked``."""

    def take_actions(self) -> Sequence[TierAction]:
        """Return what must be carried out now."""
        ...

    def began(self, epoch: str) -> None:
        """The storage is there, and was reset last to ``epoch``; "" is never."""
        ...

    def marked(self, epoch: str, *, failed: bool) -> None:
        """``epoch`` is in storage, which may be told again, or ``failed`` to get there for now."""
        ...

    def copied_out(self, operation: OperationId, *, failed: bool) -> None:
        """A ``CopyOut`` is over."""
        ...

    def copied_in(self, operation: OperationId, *, failed: bool) -> None:
        """A ``CopyIn`` is over."""
        ...

    def written(self, operation: OperationId, written: Sequence[bool]) -> None:
        """A ``Write`` is over."""
        ...

    def found(self, operation: OperationId, count: int) -> None:
        """A ``Find`` is over."""
        ...

    def read(self, operation: OperationId, landed: Sequence[bool]) -> None:
        """A ``Read`` is over."""
        ...


class TierMover:
    """Belongs to one event loop. A failure of a copy or of storage ends that operation only.

    Args:
        events: Who decides, and is told.
        memory: What copies are made in.
        block_nbytes: Of one block.
        storage: None: there is none, and no action asks for it.
        metrics: What is observed.
        on_change: Called after each operation: blocks may be free, or someone may go on.
    """

    def __init__(
        self,
        events: TierEvents,
        memory: TierMemory,
        *,
        block_nbytes: int,
        storage: StorageTier | None,
        metrics: MoveMetrics,
        on_change: Callable[[], None],
    ) -> None:
        self._events = events
        self._memory = memory
        self._block_nbytes = block_nbytes
        self._storage = storage
        self._metrics = metrics
        self._on_change = on_change
        self._clock = asyncio.get_running_loop().time
        self._thread = CopyThread("tier-copies")
        self._tasks: set[asyncio.Task[None]] = set()
        self._marks: set[asyncio.Task[None]] = set()
        self._is_closed = False

    async def check(self) -> None:
        """Use the storage once, if there is one: what is wrong from the start stops the start.

        Raises:
            ConfigError: it cannot be used.
        """
        if self._storage is not None:
            self._events.began(await self._storage.check())

    def carry_out(self) -> None:
        """Begin everything that was decided since the last call. Never waits."""
        for action in self._events.take_actions():
            task = asyncio.create_task(self._perform(action))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            if isinstance(action, MarkEpoch):
                self._marks.add(task)
                task.add_done_callback(self._marks.discard)
            task.add_done_callback(raise_in_loop)

    async def wait_marked(self, *, timeout_s: float) -> None:
        """Return when every ``MarkEpoch`` that was begun is answered, or after ``timeout_s``."""
        if self._marks:
            await asyncio.wait(set(self._marks), timeout=timeout_s)

    async def close(self, *, timeout_s: float) -> None:
        """End what was decided: first by itself, with what follows from it, then by force.

        On return no copy touches the pool any more.

        Raises:
            StepFailedError: a copy was still running after ``timeout_s``.
        """
        deadline = self._clock() + timeout_s
        self.carry_out()
        while self._tasks and (left_s := deadline - self._clock()) > 0:
            await asyncio.wait(set(self._tasks), timeout=left_s)
        self._is_closed = True
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._storage is not None:
            await self._storage.close(timeout_s=timeout_s)
        if not await self._thread.close(timeout_s=timeout_s):
            raise StepFailedError(f"a copy of a tier did not end within {timeout_s} s")

    async def _perform(self, action: TierAction) -> None:
        started = self._clock()
        match action:
            case CopyOut():
                await self._copy_out(action)
                self._metrics.observe("store", self._clock() - started)
            case CopyIn():
                await self._copy_in(action)
                self._metrics.observe("load", self._clock() - started)
            case MarkEpoch():
                if self._storage is not None:
                    is_marked = await self._storage.mark_epoch(action.epoch)
                    self._events.marked(action.epoch, failed=not is_marked)
            case Write() | Find() | Read():
                if self._storage is not None:
                    await self._use(self._storage, action, started)
        if not self._is_closed:
            self.carry_out()  # an answer can bring the next action
            self._on_change()

    async def _copy_out(self, action: CopyOut) -> None:
        failed = await self._copy(
            lambda: self._memory.store(action.block_ids, action.slots), "store"
        )
        if not failed:
            self._metrics.count_bytes(Tier.HOST, "out", len(action.slots) * self._block_nbytes)
        self._events.copied_out(action.operation, failed=failed)

    async def _copy_in(self, action: CopyIn) -> None:
        failed = await self._copy(lambda: self._memory.load(action.slots, action.block_ids), "load")
        if not failed:
            self._metrics.count_bytes(Tier.HOST, "in", len(action.slots) * self._block_nbytes)
        self._events.copied_in(action.operation, failed=failed)

    async def _copy(self, work: Callable[[], None], what: str) -> bool:
        """Return whether the copy failed. It is over either way."""
        try:
            await self._thread.run(work)
        except Exception:
            log.exception("event=tier_copy_failed kind=%s", what)
            return True
        return False

    async def _use(self, storage: StorageTier, action: Write | Find | Read, started: float) -> None:
        match action:
            case Write(operation, names, slots):
                written = await storage.write(names, slots)
                self._metrics.observe("write", self._clock() - started)
                self._events.written(operation, written)
                if storage.epoch_written:
                    self._events.marked(storage.epoch_written, failed=False)
            case Find(operation, names):
                count = await storage.find(names)
                self._metrics.observe("find", self._clock() - started)
                self._events.found(operation, count)
            case Read(operation, names, slots):
                landed = await storage.read(names, slots)
                self._metrics.observe("read", self._clock() - started)
                self._events.read(operation, landed)
