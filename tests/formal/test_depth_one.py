"""A fence is needed at depth 1 too, where reads land in the pool: the model without it fails.

The step runs on the engine's thread while the event loop takes messages, so a request can be
aborted in the middle of its step even where only one step is in flight at a time. Without a fence
its blocks are FREE at once, a ticket's read is given one of them, and the step, late, writes over
what the read has brought.
"""

import asyncio
import threading
from collections.abc import Callable

from blockmgr.block_manager import BlockManager
from blockmgr.fences import KVWriters, fences_needed
from blockmgr.receive_target import ReceiveTarget
from core.errors import OutOfBlocksError
from core.ids import OperationId, StepSeq
from engine.batch import StepBatch, StepOutput
from engine.step_loop import StepLoop
from tests.blockmgr.words import admit_new, ids_of, layout_of

DEADLINE_S = 60.0


class SlowStep:
    """A step that goes on until the test lets it end."""

    is_asynchronous = False

    def __init__(self) -> None:
        self.step = StepSeq(0)
        self.has_begun = threading.Event()
        self.may_end = threading.Event()

    def launch(self, batch: StepBatch, on_layers: Callable[[int], None]) -> "SlowStep":
        del on_layers
        self.step = batch.step
        return self

    def wait(self) -> StepOutput:
        self.has_begun.set()
        assert self.may_end.wait(DEADLINE_S)
        return StepOutput(step=self.step, tokens=(), duration_s=0.0)

    def drain(self) -> None:
        pass


async def test_a17_at_depth_one_no_read_is_given_what_a_step_in_flight_writes() -> None:
    needed = fences_needed(KVWriters.CONSUMER, releases_meet_steps=True)
    blocks = BlockManager(layout_of(), 3, fences=needed, prefix_caching=False)
    running = admit_new(blocks, "R", 40)
    written = set(ids_of(blocks, running))
    batches = [StepBatch(step=blocks.dispatch_step([running]), openings=(), sequences=())]
    completed = asyncio.Event()
    runner = SlowStep()

    def complete(batch: StepBatch, _output: StepOutput) -> None:
        blocks.complete_step(batch.step)
        completed.set()

    steps = StepLoop(
        runner,
        depth=1,
        schedule=lambda: batches.pop() if batches else None,
        complete=complete,
        fail=blocks.fail_step,
    )
    try:
        steps.wake()
        assert await asyncio.to_thread(runner.has_begun.wait, DEADLINE_S)
        blocks.release(running)  # the client leaves, and the loop is free to hear of it
        receiver = admit_new(blocks, "N", 0)
        try:
            (placed,) = blocks.begin_receive(receiver, [ReceiveTarget(0, 0, 1)], OperationId(1))
        except OutOfBlocksError:
            placed = []
        assert written.isdisjoint(block_id for block_id, _ in placed)

        runner.may_end.set()
        async with asyncio.timeout(DEADLINE_S):
            await completed.wait()
        assert blocks.num_withheld == 0
    finally:
        runner.may_end.set()
        steps.close(timeout_s=DEADLINE_S)
