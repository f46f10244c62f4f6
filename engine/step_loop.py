"""Keeps the engine fed: the next step is scheduled before the output of the last is read."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

from core.errors import StepFailedError
from core.ids import StepSeq
from engine.batch import StepBatch, StepOutput
from engine.executor import StepExecutor, StepRunner


@dataclass(frozen=True, slots=True)
class _InFlight:
    batch: StepBatch
    submitted_at: float


class StepLoop:
    """Runs steps while ``schedule`` has any, up to ``depth`` in flight; sleeps otherwise.

    All callbacks run on the event loop that ``run`` is awaited in; the engine's thread sees
    batches only. Wake-ups come from completed steps and from ``wake``; nothing polls.
    """

    def __init__(
        self,
        runner: StepRunner,
        *,
        depth: int,
        schedule: Callable[[], StepBatch | None],
        complete: Callable[[StepBatch, StepOutput], None],
        fail: Callable[[StepSeq], None],
        layers: Callable[[StepBatch, int], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start the engine's thread.

        Args:
            runner: Of the model.
            depth: Steps in flight.
            schedule: Returns the next step, or None where there is no work.
            complete: Told of each step that has completed, in order.
            fail: Told of each step that has failed.
            layers: Told of each mark of a step that is in flight, when that layer and all before
                it are complete; None: nobody sets marks.
            clock: Monotonic seconds.
        """
        self._depth = depth
        self._schedule = schedule
        self._complete = complete
        self._fail = fail
        self._layers = layers
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._executor = StepExecutor(runner, self._report, self._report_layers)
        self._in_flight: dict[StepSeq, _InFlight] = {}
        self._num_completed = 0
        self._last_completed_at = clock()
        self._broken: asyncio.Future[None] = self._loop.create_future()
        self._wake_is_due = False

    def wake(self) -> None:
        """``schedule`` may have something now. Many calls in one turn of the loop cost one."""
        if not self._wake_is_due:
            self._wake_is_due = True
            self._loop.call_soon(self._fill)

    @property
    def num_completed(self) -> int:
        """Steps that have completed."""
        return self._num_completed

    def oldest_submitted_at(self) -> float | None:
        """Return since when the oldest step in flight could run; None: none is in flight.

        One that was submitted behind another could not before that one's end. Any thread may ask.
        """
        in_flight = list(self._in_flight.values())  # at once: the loop goes on meanwhile
        return max(in_flight[0].submitted_at, self._last_completed_at) if in_flight else None

    async def run(self) -> None:
        """Serve until cancelled.

        Raises:
            StepFailedError: a step died; its device work is over, and no step runs any more.
        """
        await self._broken

    def close(self, *, timeout_s: float) -> None:
        """Finish the step in flight and end the thread; later steps do not run."""
        self._broken.cancel()
        self._executor.close(timeout_s=timeout_s)

    def _fill(self) -> None:
        self._wake_is_due = False
        while not self._broken.done() and len(self._in_flight) < self._depth:
            batch = self._schedule()
            if batch is None:
                return
            self._in_flight[batch.step] = _InFlight(batch, self._clock())
            self._executor.submit(batch)

    def _report(self, step: StepSeq, result: StepOutput | StepFailedError) -> None:
        """Carry a step's end from the engine's thread to the event loop."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._finish, step, result)

    def _report_layers(self, step: StepSeq, mark: int) -> None:
        """Carry a mark to the event loop, ahead of the step's end."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._take_layers, step, mark)

    def _take_layers(self, step: StepSeq, mark: int) -> None:
        if self._layers is not None and not self._broken.done():
            self._layers(self._in_flight[step].batch, mark)

    def _finish(self, step: StepSeq, result: StepOutput | StepFailedError) -> None:
        batch = self._in_flight.pop(step).batch
        if isinstance(result, StepFailedError):
            self._fail(step)
            if not self._broken.done():
                self._broken.set_exception(result)
            return
        self._num_completed += 1
        self._last_completed_at = self._clock()
        self._complete(batch, result)
        self._fill()
