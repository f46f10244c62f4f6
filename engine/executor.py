"""The engine's thread: runs submitted steps in order and reports the end of each."""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Protocol

from core.errors import StepFailedError
from core.ids import StepSeq
from engine.batch import StepBatch, StepOutput

log = logging.getLogger(__name__)

OnComplete = Callable[[StepSeq, StepOutput | StepFailedError], None]
OnLayers = Callable[[StepSeq, int], None]


class LaunchedStep(Protocol):
    """A step that the device has been given."""

    step: StepSeq

    def wait(self) -> StepOutput:
        """Return the output once the device is done with the step, its layers reported before."""
        ...


class StepRunner(Protocol):
    """What the executor needs of ``engine.runner.ModelRunner``."""

    @property
    def is_asynchronous(self) -> bool:
        """Whether ``launch`` returns before the step has completed."""
        ...

    def launch(self, batch: StepBatch, on_layers: Callable[[int], None]) -> LaunchedStep:
        """Give the device ``batch``, to run after everything launched before.

        ``on_layers`` is told of the batch's marks as the device completes them: in this call, or
        in ``LaunchedStep.wait``.
        """
        ...

    def drain(self) -> None:
        """Return when the device runs nothing any more."""
        ...


@dataclass(frozen=True, slots=True)
class _Refused:
    """A step that was never given to the runner."""

    step: StepSeq
    reason: StepFailedError


@dataclass(frozen=True, slots=True)
class _Raised:
    """A step whose launch raised; part of it may be on the device."""

    step: StepSeq
    error: Exception


class StepExecutor:
    """Runs steps on a thread named "engine"; on an accelerator, "engine-events" awaits their ends.

    Two threads there, because one that sleeps on an event cannot launch the next step. ``submit``
    and ``close`` belong to one owner thread.

    Promises:
        * every submitted step is reported exactly once, in the order of ``submit``;
        * when a step is reported, failed or not, the device writes nothing for it any more;
        * after a failed step none is launched: those behind it are reported as failed, and
          ``submit`` raises;
        * marked layers of a step are reported before it, when the device has completed them, in
          order; none of a step behind a failed one.

    ``on_complete`` and ``on_layers`` are called on one of these threads and must not block.
    """

    def __init__(
        self, runner: StepRunner, on_complete: OnComplete, on_layers: OnLayers | None = None
    ) -> None:
        self._runner = runner
        self._on_complete = on_complete
        self._on_layers = on_layers
        self._batches: SimpleQueue[StepBatch | None] = SimpleQueue()
        self._launched: SimpleQueue[LaunchedStep | _Refused | _Raised | None] = SimpleQueue()
        self._failure: StepFailedError | None = None
        """Why nothing is launched any more."""
        self._reported_failure: StepFailedError | None = None
        """Why every later step is reported as failed: known later than ``_failure``, because the
        steps between completed and are reported as such."""
        self._is_closed = False
        self._threads = [threading.Thread(target=self._launch_all, name="engine", daemon=True)]
        if runner.is_asynchronous:
            self._threads.append(
                threading.Thread(target=self._finish_all, name="engine-events", daemon=True)
            )
        for thread in self._threads:
            thread.start()

    def submit(self, batch: StepBatch) -> None:
        """Queue ``batch`` behind all earlier ones. Never blocks.

        Raises:
            StepFailedError: an earlier step failed, or the executor is closed. Nothing is queued.
        """
        if self._failure is not None:
            raise StepFailedError(f"step {batch.step} refused: {self._failure}") from self._failure
        if self._is_closed:
            raise StepFailedError(f"step {batch.step} refused: the engine is closed")
        self._batches.put(batch)

    def close(self, *, timeout_s: float) -> None:
        """Finish the steps in flight, report the queued ones as failed, end the threads.

        A second call does nothing but wait again.

        Raises:
            StepFailedError: a step was still running after ``timeout_s``, and may go on writing.
        """
        if not self._is_closed:
            self._is_closed = True
            self._batches.put(None)
        deadline_s = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))
            if thread.is_alive():
                raise StepFailedError(f"thread {thread.name} did not end within {timeout_s} s")

    def _launch_all(self) -> None:
        # Waits without a deadline: ``close`` ends it.
        while (batch := self._batches.get()) is not None:
            launched = self._launch(batch)
            if self._runner.is_asynchronous:
                self._launched.put(launched)
            else:
                self._finish(launched)
        self._launched.put(None)

    def _finish_all(self) -> None:
        while (launched := self._launched.get()) is not None:
            self._finish(launched)

    def _launch(self, batch: StepBatch) -> LaunchedStep | _Refused | _Raised:
        if self._failure is not None:
            return _Refused(batch.step, self._failure)
        if self._is_closed:
            return _Refused(batch.step, StepFailedError("the engine was closed"))
        try:
            return self._runner.launch(batch, partial(self._reach, batch.step))
        except Exception as error:  # noqa: BLE001 - whatever a model raises ends this engine
            self._break(_failure_of(batch.step, error))
            return _Raised(batch.step, error)

    def _reach(self, step: StepSeq, mark: int) -> None:
        """Report a marked layer. Never raises: the compiled layers call it."""
        if self._on_layers is None or self._reported_failure is not None:
            return  # behind a failed step, what was computed is worth nothing
        try:
            self._on_layers(step, mark)
        except Exception as error:
            log.exception("on_layers failed step=%d layer=%d", step, mark)
            self._break(_failure_of(step, error))

    def _finish(self, launched: LaunchedStep | _Refused | _Raised) -> None:
        result = self._result_of(launched)
        try:
            self._on_complete(launched.step, result)
        except Exception as error:
            log.exception("on_complete failed step=%d", launched.step)
            self._break(_failure_of(launched.step, error))

    def _result_of(
        self, launched: LaunchedStep | _Refused | _Raised
    ) -> StepOutput | StepFailedError:
        if isinstance(launched, _Refused):
            return _failure_of(launched.step, launched.reason)
        if isinstance(launched, _Raised):
            return self._drained_failure(launched.step, launched.error)
        try:
            output = launched.wait()
        except Exception as error:  # noqa: BLE001 - as in _launch
            return self._drained_failure(launched.step, error)
        if self._reported_failure is not None:
            return _failure_of(launched.step, self._reported_failure)
        return output

    def _drained_failure(self, step: StepSeq, cause: Exception) -> StepFailedError:
        """Return the error of ``step``, when whatever of it reached the device has ended."""
        log.error("step failed step=%d", step, exc_info=cause)
        try:
            self._runner.drain()
        except Exception:
            log.exception("drain failed step=%d", step)
        failure = _failure_of(step, cause)
        self._reported_failure = failure
        self._break(failure)
        return failure

    def _break(self, failure: StepFailedError) -> None:
        if self._failure is None:
            self._failure = failure


def _failure_of(step: StepSeq, cause: Exception) -> StepFailedError:
    failure = StepFailedError(f"step {step} failed: {str(cause) or type(cause).__name__}")
    failure.__cause__ = cause
    return failure
