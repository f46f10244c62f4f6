"""Parts for the tests of the tiers: memory, a book that is a list, and storages that misbehave."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

from prometheus_client import CollectorRegistry

from core.errors import StorageError
from core.ids import BlockId, OperationId
from core.tiers import BlockName, HostSlot, TierAction
from transfer.tiers.metrics import MoveMetrics
from transfer.tiers.object_storage import BlockStorage
from transfer.tiers.storage_tier import StorageTier
from transfer.tiers.trimming import StoredObject

NBYTES = 4096
FINGERPRINT = bytes(range(16))
TIMEOUT_S = 60.0
"""Of a storage that answers, however busy the machine is."""
EPOCH = datetime(2026, 1, 1, tzinfo=UTC)


class Memory:
    """A pool and host slots, in bytes."""

    def __init__(self, num_blocks: int = 8, num_slots: int = 8) -> None:
        self.pool = [bytearray([at] * NBYTES) for at in range(num_blocks)]
        self.slots = [bytearray(NBYTES) for _ in range(num_slots)]
        self.fails = False

    def view(self, slot: HostSlot) -> memoryview:
        return memoryview(self.slots[slot])

    def store(self, block_ids: Sequence[BlockId], slots: Sequence[HostSlot]) -> None:
        self._check()
        for block_id, slot in zip(block_ids, slots, strict=True):
            self.slots[slot][:] = self.pool[block_id]

    def load(self, slots: Sequence[HostSlot], block_ids: Sequence[BlockId]) -> None:
        self._check()
        for slot, block_id in zip(slots, block_ids, strict=True):
            self.pool[block_id][:] = self.slots[slot]

    def _check(self) -> None:
        if self.fails:
            message = "the device is gone"
            raise RuntimeError(message)


@dataclass
class Answers:
    """Hands out actions and keeps the answers: the deciding side."""

    actions: list[TierAction] = field(default_factory=list[TierAction])
    epoch: str | None = None
    marks: list[tuple[str, bool]] = field(default_factory=list[tuple[str, bool]])
    answers: dict[OperationId, object] = field(default_factory=dict[OperationId, object])

    def take_actions(self) -> list[TierAction]:
        actions, self.actions = self.actions, []
        return actions

    def began(self, epoch: str) -> None:
        self.epoch = epoch

    def marked(self, epoch: str, *, failed: bool) -> None:
        self.marks.append((epoch, failed))

    def copied_out(self, operation: OperationId, *, failed: bool) -> None:
        self._answer(operation, failed)

    def copied_in(self, operation: OperationId, *, failed: bool) -> None:
        self._answer(operation, failed)

    def written(self, operation: OperationId, written: Sequence[bool]) -> None:
        self._answer(operation, list(written))

    def found(self, operation: OperationId, count: int) -> None:
        self._answer(operation, count)

    def read(self, operation: OperationId, landed: Sequence[bool]) -> None:
        self._answer(operation, list(landed))

    def _answer(self, operation: OperationId, answer: object) -> None:
        assert operation not in self.answers, "answered twice"
        self.answers[operation] = answer


class MisbehavingStorage:
    """A storage in memory that hangs, fails, loses, changes or cuts off, as the test says."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.hangs = False
        self.fails = False
        self.num_calls = 0
        self.released = asyncio.Event()

    async def put(self, path: str, content: bytes) -> None:
        await self._misbehave()
        self.objects[path] = content

    async def get(self, path: str) -> memoryview | None:
        await self._misbehave()
        content = self.objects.get(path)
        return None if content is None else memoryview(content)

    async def has(self, path: str) -> bool:
        await self._misbehave()
        return path in self.objects

    async def list_below(self, folder: str) -> list[StoredObject]:
        await self._misbehave()
        return [
            StoredObject(path, len(content), EPOCH + timedelta(seconds=at))
            for at, (path, content) in enumerate(self.objects.items())
            if path.startswith(folder)
        ]

    async def delete(self, paths: Sequence[str]) -> None:
        await self._misbehave()
        for path in paths:
            self.objects.pop(path, None)

    async def _misbehave(self) -> None:
        self.num_calls += 1
        if self.hangs:
            await self.released.wait()
        if self.fails:
            message = "no route to host"
            raise StorageError(message)


def name_of(index: int, group: int = 0) -> BlockName:
    return BlockName(group, index.to_bytes(16, "big"))


def names_of(count: int) -> tuple[BlockName, ...]:
    return tuple(map(name_of, range(count)))


def slots_of(*slots: int) -> tuple[HostSlot, ...]:
    return tuple(map(HostSlot, slots))


def make_tier(
    storage: BlockStorage,
    memory: Memory,
    *,
    timeout_s: float = TIMEOUT_S,
    max_nbytes: int | None = None,
) -> StorageTier:
    return StorageTier(
        storage,
        url="test://",
        fingerprint=FINGERPRINT,
        view=memory.view,
        timeout_s=timeout_s,
        metrics=MoveMetrics(CollectorRegistry(), role="test"),
        max_nbytes=max_nbytes,
    )
