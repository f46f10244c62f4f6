"""Host memory for blocks that left the pool, and the copies between the two."""

import os
from collections.abc import Iterator, Sequence

import torch

from core.errors import ConfigError
from core.ids import BlockId
from core.tiers import HostSlot
from engine.kv_pool import KVPool


class HostArena:
    """``num_slots`` blocks in host memory; pinned where the pool is on an accelerator.

    ``store`` and ``load`` are called by one thread, and return when the copy is over: nothing of
    it touches pool or arena any more, whether it returns or raises. On an accelerator they run on
    a stream of their own beside the steps. That needs no order with the steps' stream: a store
    reads blocks whose steps have completed, and a load writes blocks that no step in flight may
    touch and that the first step which uses them is launched after.
    """

    def __init__(self, pool: KVPool, num_slots: int) -> None:
        """Allocate.

        Raises:
            ConfigError: pool and arena do not fit in this machine.
        """
        self.num_slots = num_slots
        self._pool = pool.blocks
        nbytes = num_slots * pool.layout.block_nbytes
        _check_memory(nbytes + (pool.nbytes if self._pool.device.type == "cpu" else 0))
        self._is_on_device = self._pool.device.type != "cpu"
        memory = torch.empty(nbytes, dtype=torch.uint8, pin_memory=self._is_on_device)
        self._slots = memory.view(num_slots, pool.layout.block_nbytes)
        if self._is_on_device:
            self._stream = torch.cuda.Stream(self._pool.device)

    def view(self, slot: HostSlot) -> memoryview:
        """Return the bytes of ``slot`` in place."""
        return memoryview(self._slots[slot].numpy())

    def store(self, block_ids: Sequence[BlockId], slots: Sequence[HostSlot]) -> None:
        """Copy blocks of the pool into slots."""
        self._copy(self._pool, block_ids, self._slots, slots)

    def load(self, slots: Sequence[HostSlot], block_ids: Sequence[BlockId]) -> None:
        """Copy slots into blocks of the pool."""
        self._copy(self._slots, slots, self._pool, block_ids)

    def _copy(
        self,
        source: torch.Tensor,
        rows: Sequence[int],
        target: torch.Tensor,
        target_rows: Sequence[int],
    ) -> None:
        if not self._is_on_device:
            _copy_runs(source, rows, target, target_rows)
            return
        with torch.cuda.stream(self._stream):
            try:
                _copy_runs(source, rows, target, target_rows)
            finally:
                self._stream.synchronize()


def _copy_runs(
    source: torch.Tensor, rows: Sequence[int], target: torch.Tensor, target_rows: Sequence[int]
) -> None:
    for start, end in _common_runs(rows, target_rows):
        first, at = rows[start], target_rows[start]
        count = end - start
        target[at : at + count].copy_(source[first : first + count], non_blocking=True)


def _common_runs(rows: Sequence[int], others: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield [start, end) of the stretches in which both count up by one."""
    start = 0
    for at in range(1, len(rows) + 1):
        if at == len(rows) or rows[at] - rows[at - 1] != 1 or others[at] - others[at - 1] != 1:
            yield start, at
            start = at


def _check_memory(nbytes: int) -> None:
    machine_nbytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if nbytes > machine_nbytes:
        raise ConfigError(
            f"cache.host_tier_gib: pool and host tier need {nbytes / 2**30:.1f} GiB, this machine "
            f"has {machine_nbytes / 2**30:.1f} GiB; lower cache.host_tier_gib"
        )
