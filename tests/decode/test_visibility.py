"""Received bytes must be visible to the first step that reads them.

A NIC may report completion before a kernel that runs already can see the bytes: it has cached what
was there. What helps is that the consuming step is launched after the completion, by the CPU. The
device here caches the whole pool at each launch, so that a step sees exactly what was there then.
"""

import numpy as np

from blockmgr.receive_target import ReceiveTarget
from core.ids import OperationId
from decode.sequence import Sequence
from engine.batch import StepBatch
from tests.decode.bench import Bench

READ = OperationId(1)
SENT = 0x11


class CachingDevice:
    """Steps see the pool as it was when they were launched."""

    def __init__(self, num_blocks: int) -> None:
        self.pool = np.zeros(num_blocks, dtype=np.uint8)
        self.seen: dict[int, np.ndarray] = {}

    def launch(self, batch: StepBatch) -> None:
        self.seen[batch.step] = self.pool.copy()

    def read(self, batch: StepBatch, sequence: Sequence) -> set[int]:
        """Return what ``batch`` finds in the blocks of ``sequence``; nothing: it is not in it."""
        parts = [part for part in batch.sequences if part.slot == sequence.slot]
        return {int(at) for p in parts for at in self.seen[batch.step][p.block_tables[0][:2]]}


def receive_beside_a_step(b: Bench, device: CachingDevice) -> tuple[Sequence, StepBatch]:
    """R's read completes while a step of somebody else runs."""
    b.add("other", 15, first=1000)
    received = b.add("R", 32, remote=True, max_tokens=4)
    placed = b.scheduler.receive(received.owner, [ReceiveTarget(0, 0, 2)], READ)
    assert placed is not None
    running = b.step()
    device.launch(running)
    device.pool[[block_id for block_id, _ in placed[0]]] = SENT
    b.blocks.end_operation(READ)
    return received, running


def test_b11_the_consuming_step_is_launched_after_the_completion() -> None:
    b, device = Bench(10), CachingDevice(10)
    received, running = receive_beside_a_step(b, device)
    # When R is promoted while the earlier step still runs
    b.scheduler.deliver(received.owner, 5)
    assert device.read(running, received) == set()
    consuming = b.step()
    device.launch(consuming)
    # Then the first step that has R was launched afterwards, and sees what was sent
    assert consuming.step > running.step
    assert device.read(consuming, received) == {SENT}
    for batch in (running, consuming):
        b.complete(batch)


def test_b11_a_step_launched_before_the_completion_sees_stale_bytes() -> None:
    """What the rule is for: without the launch boundary the same device reads what was there."""
    b, device = Bench(10), CachingDevice(10)
    received, running = receive_beside_a_step(b, device)
    b.scheduler.deliver(received.owner, 5)
    consuming = b.step()
    device.seen[consuming.step] = device.seen[running.step]  # fed to the kernel that runs

    assert device.read(consuming, received) == {0}
    for batch in (running, consuming):
        b.complete(batch)
