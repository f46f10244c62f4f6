"""Clearing of blocks: only their own bytes, and each submission exactly what it named."""

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from core.ids import BlockId, StepSeq
from core.kv_layout import LayerSpec, group_layers
from engine.batch import StepBatch, StepOutput
from engine.executor import StepExecutor
from engine.kv_pool import KVPool

DEADLINE_S = 60.0
LAYOUT = group_layers(
    [LayerSpec(num_kv_heads=2, head_dim=4) for _ in range(3)], block_size=4, dtype="bfloat16"
)


def full_pool() -> KVPool:
    pool = KVPool(LAYOUT, 12, device=torch.device("cpu"))
    pool.fill(range(12), 0xAB)
    return pool


def cleared(pool: KVPool) -> list[int]:
    """Return the blocks that are all zeros; every other one must be untouched."""
    contents = [set(pool.bytes_of(block_id)) for block_id in range(pool.num_blocks)]
    assert all(content in ({0}, {0xAB}) for content in contents)
    return [at for at, content in enumerate(contents) if content == {0}]


def test_b09_clearing_a_block_changes_no_byte_of_its_neighbours() -> None:
    # Given blocks whose layers are views at offsets in one slab
    pool = full_pool()
    assert pool.keys[2][0].data_ptr() > pool.blocks[0].data_ptr()
    # When one is cleared
    pool.zero([5])
    # Then its neighbours keep every byte, in every layer
    assert cleared(pool) == [5]
    assert not pool.values[2][5].any()


@dataclass
class HeldRunner:
    """Clears a real pool, once the test lets the device go on."""

    pool: KVPool
    is_asynchronous: bool = False
    may_run: threading.Event = field(default_factory=threading.Event)

    def launch(self, batch: StepBatch, on_layers: Callable[[int], None]) -> "_Done":
        del on_layers
        assert self.may_run.wait(DEADLINE_S)
        self.pool.zero(batch.zero_blocks)
        return _Done(batch.step)

    def drain(self) -> None:
        """Nothing runs beside the launching thread."""


@dataclass
class _Done:
    step: StepSeq

    def wait(self) -> StepOutput:
        return StepOutput(step=self.step, tokens=(), duration_s=0.0)


def test_b10_two_submissions_behind_device_work_clear_what_each_named() -> None:
    # Given a busy device, and two lists to clear that were submitted one after another
    pool = full_pool()
    runner = HeldRunner(pool)
    reports: queue.Queue[StepSeq] = queue.Queue()
    executor = StepExecutor(runner, lambda step, _: reports.put(step))
    staging = [BlockId(3)]
    for step in (1, 2):
        zero_blocks = tuple(staging)
        executor.submit(StepBatch(StepSeq(step), (), (), zero_blocks=zero_blocks))
        staging[0] = BlockId(9)  # the caller goes on with its own list
    # When the device gets to them
    runner.may_run.set()
    assert [reports.get(timeout=DEADLINE_S) for _ in range(2)] == [1, 2]
    executor.close(timeout_s=DEADLINE_S)
    # Then exactly these two blocks are clear
    assert cleared(pool) == [3, 9]
