"""A step that waits behind another one is not standing still: its time begins with its turn.

The failure guarded against: at ``scheduler.overlap_depth`` 2, healthy steps of half of
``deploy.progress_timeout_s`` each have their worker killed.
"""

import asyncio
import threading
from collections.abc import Callable

from core.ids import StepSeq
from engine.batch import StepBatch, StepOutput
from engine.step_loop import StepLoop

DEADLINE_S = 60.0


class Held:
    """Steps that each end when the test lets it."""

    is_asynchronous = False

    def __init__(self) -> None:
        self.may_end = threading.Semaphore(0)

    def launch(self, batch: StepBatch, on_layers: Callable[[int], None]) -> "HeldStep":
        del on_layers
        return HeldStep(self, batch.step)

    def drain(self) -> None:
        pass


class HeldStep:
    def __init__(self, held: Held, step: StepSeq) -> None:
        self._held = held
        self.step = step

    def wait(self) -> StepOutput:
        assert self._held.may_end.acquire(timeout=DEADLINE_S)
        return StepOutput(step=self.step, tokens=(), duration_s=0.0)


async def test_the_time_of_a_step_begins_when_the_one_before_it_has_ended() -> None:
    now_s = 100.0
    completed = asyncio.Event()
    runner = Held()
    batches = [StepBatch(step=StepSeq(n), openings=(), sequences=()) for n in (2, 1)]
    steps = StepLoop(
        runner,
        depth=2,
        schedule=lambda: batches.pop() if batches else None,
        complete=lambda _batch, _output: completed.set(),
        fail=lambda _step: None,
        clock=lambda: now_s,
    )
    try:
        assert steps.oldest_submitted_at() is None
        steps.wake()
        await asyncio.sleep(0)
        now_s = 140.0
        assert steps.oldest_submitted_at() == 100.0
        runner.may_end.release()
        async with asyncio.timeout(DEADLINE_S):
            await completed.wait()
        assert steps.oldest_submitted_at() == 140.0
    finally:
        runner.may_end.release(2)
        steps.close(timeout_s=DEADLINE_S)
