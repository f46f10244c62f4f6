"""The engine's thread: order, failure and shutdown, each with a runner that the test controls.

A13: a step that dies is reported after a device drain, and nothing is launched behind it.
"""

import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest
import torch

from core.errors import StepFailedError
from core.ids import StepSeq
from engine.batch import StepBatch, StepOutput
from engine.executor import StepExecutor
from engine.runner import _recorded_event

DEADLINE_S = 60.0


def batch(step: int) -> StepBatch:
    return StepBatch(step=StepSeq(step), openings=(), sequences=())


@dataclass
class Launched:
    """A step that completes, or whose device fails, when the test says so."""

    step: StepSeq
    may_end: threading.Event = field(default_factory=threading.Event)
    error: Exception | None = None
    report_layers: Callable[[], None] = lambda: None

    def wait(self) -> StepOutput:
        self.report_layers()
        assert self.may_end.wait(DEADLINE_S)
        if self.error is not None:
            raise self.error
        return StepOutput(step=self.step, tokens=(), duration_s=0.0)


class ControlledRunner:
    """Launches when told to, fails where told to, and writes down what was asked of it."""

    def __init__(self, *, is_asynchronous: bool) -> None:
        self.is_asynchronous = is_asynchronous
        self.fail_launch_of: dict[int, Exception] = {}
        self.fail_drain = False
        self.may_launch = threading.Event()
        self.may_launch.set()
        self.launches: queue.Queue[Launched] = queue.Queue()
        self.threads: list[str] = []
        self.num_drains = 0

    def launch(self, batch: StepBatch, on_layers: Callable[[int], None]) -> Launched:
        assert self.may_launch.wait(DEADLINE_S)
        self.threads.append(threading.current_thread().name)

        def report_layers() -> None:
            for mark in batch.layer_marks:
                on_layers(mark)

        launched = Launched(batch.step)
        if self.is_asynchronous:
            launched.report_layers = report_layers
        else:
            report_layers()
        if batch.step in self.fail_launch_of:
            raise self.fail_launch_of[batch.step]
        self.launches.put(launched)
        return launched

    def drain(self) -> None:
        self.num_drains += 1
        if self.fail_drain:
            raise RuntimeError("the device is gone")

    def launched(self) -> Launched:
        return self.launches.get(timeout=DEADLINE_S)


class Reports:
    def __init__(self) -> None:
        self.queue: queue.Queue[tuple[StepSeq, StepOutput | StepFailedError]] = queue.Queue()
        self.raise_on: set[int] = set()

    def __call__(self, step: StepSeq, result: StepOutput | StepFailedError) -> None:
        self.queue.put((step, result))
        if step in self.raise_on:
            raise RuntimeError("the listener is gone")

    def next(self) -> tuple[StepSeq, StepOutput | StepFailedError]:
        return self.queue.get(timeout=DEADLINE_S)


@pytest.fixture(params=[False, True], ids=["completes at launch", "asynchronous"])
def runner(request: pytest.FixtureRequest) -> ControlledRunner:
    return ControlledRunner(is_asynchronous=request.param)


@pytest.fixture
def reports() -> Reports:
    return Reports()


@pytest.fixture
def executor(runner: ControlledRunner, reports: Reports) -> Iterator[StepExecutor]:
    before = set(threading.enumerate())
    executor = StepExecutor(runner, reports)
    yield executor
    while not runner.launches.empty():
        runner.launched().may_end.set()
    executor.close(timeout_s=DEADLINE_S)
    assert set(threading.enumerate()) <= before, "a thread is left running"
    assert reports.queue.empty(), "a step was reported that the test does not know of"


def test_steps_run_and_are_reported_in_the_order_of_submit(
    executor: StepExecutor, runner: ControlledRunner, reports: Reports
) -> None:
    for step in range(1, 6):
        executor.submit(batch(step))
    for step in range(1, 6):
        launched = runner.launched()
        assert launched.step == step
        launched.may_end.set()
        (reported, result) = reports.next()
        assert reported == step
        assert isinstance(result, StepOutput)
    assert set(runner.threads) == {"engine"}


def test_an_accelerator_gets_the_next_step_before_the_last_one_has_ended(reports: Reports) -> None:
    runner = ControlledRunner(is_asynchronous=True)
    executor = StepExecutor(runner, reports)
    executor.submit(batch(1))
    executor.submit(batch(2))
    (first, second) = (runner.launched(), runner.launched())

    second.may_end.set()
    first.may_end.set()

    assert [reports.next()[0], reports.next()[0]] == [1, 2]
    executor.close(timeout_s=DEADLINE_S)


def test_a13_a_step_that_raises_fails_after_a_drain_with_all_behind_it(
    executor: StepExecutor, runner: ControlledRunner, reports: Reports
) -> None:
    cause = ValueError("bad kernel")
    runner.fail_launch_of[2] = cause
    runner.may_launch.clear()
    for step in (1, 2, 3):
        executor.submit(batch(step))  # the last would be refused if the second had failed already
    runner.may_launch.set()
    runner.launched().may_end.set()

    assert isinstance(reports.next()[1], StepOutput)
    (step, failure) = reports.next()
    assert (step, runner.num_drains) == (2, 1)
    assert isinstance(failure, StepFailedError)
    assert failure.__cause__ is cause
    (step, failure) = reports.next()
    assert step == 3
    assert isinstance(failure, StepFailedError)
    assert "bad kernel" in str(failure)
    assert runner.launches.empty()
    with pytest.raises(StepFailedError, match="bad kernel"):
        executor.submit(batch(4))


def test_a13_a_device_error_fails_a_step_that_was_already_launched_behind_it(
    reports: Reports,
) -> None:
    runner = ControlledRunner(is_asynchronous=True)
    executor = StepExecutor(runner, reports)
    executor.submit(batch(1))
    executor.submit(batch(2))
    (first, second) = (runner.launched(), runner.launched())

    first.error = RuntimeError("illegal address")
    first.may_end.set()
    second.may_end.set()

    for expected in (1, 2):
        (step, failure) = reports.next()
        assert step == expected
        assert isinstance(failure, StepFailedError)
        assert "illegal address" in str(failure)
    executor.close(timeout_s=DEADLINE_S)


def test_a13_a_drain_that_raises_too_still_reports_the_step(
    executor: StepExecutor, runner: ControlledRunner, reports: Reports
) -> None:
    runner.fail_launch_of[1] = RuntimeError("bad kernel")
    runner.fail_drain = True
    executor.submit(batch(1))
    (step, failure) = reports.next()
    assert step == 1
    assert isinstance(failure, StepFailedError)


def test_close_ends_the_step_in_flight_and_fails_the_queued_ones(reports: Reports) -> None:
    runner = ControlledRunner(is_asynchronous=False)
    executor = StepExecutor(runner, reports)
    for step in (1, 2, 3):
        executor.submit(batch(step))
    launched = runner.launched()

    with pytest.raises(StepFailedError, match="did not end"):
        executor.close(timeout_s=0.01)
    launched.may_end.set()
    executor.close(timeout_s=DEADLINE_S)

    assert isinstance(reports.next()[1], StepOutput)
    for expected in (2, 3):
        (step, failure) = reports.next()
        assert step == expected
        assert isinstance(failure, StepFailedError)
    with pytest.raises(StepFailedError, match="closed"):
        executor.submit(batch(4))


def test_a_listener_that_raises_breaks_the_engine_and_not_the_thread(
    executor: StepExecutor, runner: ControlledRunner, reports: Reports
) -> None:
    reports.raise_on = {1}
    executor.submit(batch(1))
    executor.submit(batch(2))
    launched = [runner.launched() for _ in range(1 + runner.is_asynchronous)]
    for step in launched:
        step.may_end.set()
    assert reports.next()[0] == 1
    assert reports.next()[0] == 2
    with pytest.raises(StepFailedError, match="listener is gone"):
        executor.submit(batch(3))


def marked(step: int, *marks: int) -> StepBatch:
    return StepBatch(step=StepSeq(step), openings=(), sequences=(), layer_marks=marks)


def test_b12_marked_layers_are_reported_in_order_before_the_end_of_their_step(
    runner: ControlledRunner,
) -> None:
    told: queue.Queue[object] = queue.Queue()
    executor = StepExecutor(
        runner,
        lambda step, _: told.put((step, "end")),
        lambda step, mark: told.put((step, mark)),
    )
    for step in (1, 2):
        executor.submit(marked(step, 3, 7))
        runner.launched().may_end.set()
    wanted = [(1, 3), (1, 7), (1, "end"), (2, 3), (2, 7), (2, "end")]
    assert [told.get(timeout=DEADLINE_S) for _ in wanted] == wanted
    executor.close(timeout_s=DEADLINE_S)


def test_b12_no_layer_of_a_step_behind_a_failed_one_is_reported() -> None:
    # Given an accelerator that was given step 2 before step 1 turns out to have failed
    runner = ControlledRunner(is_asynchronous=True)
    told: queue.Queue[object] = queue.Queue()
    executor = StepExecutor(
        runner,
        lambda step, result: told.put((step, type(result))),
        lambda step, mark: told.put((step, mark)),
    )
    executor.submit(marked(1, 3))
    executor.submit(marked(2, 3))
    first, second = runner.launched(), runner.launched()
    first.error = RuntimeError("illegal address")
    first.may_end.set()
    second.may_end.set()
    # Then what step 2 computed from it is offered to nobody
    wanted = [(1, 3), (1, StepFailedError), (2, StepFailedError)]
    assert [told.get(timeout=DEADLINE_S) for _ in wanted] == wanted
    executor.close(timeout_s=DEADLINE_S)


def test_a_listener_of_layers_that_raises_breaks_the_engine_and_not_the_step(
    runner: ControlledRunner, reports: Reports
) -> None:
    def raise_always(step: StepSeq, mark: int) -> None:
        raise RuntimeError(f"nobody takes layer {mark} of step {step}")

    executor = StepExecutor(runner, reports, raise_always)
    executor.submit(marked(1, 3))
    runner.launched().may_end.set()
    assert isinstance(reports.next()[1], StepOutput)
    with pytest.raises(StepFailedError, match="nobody takes layer 3"):
        executor.submit(batch(2))
    executor.close(timeout_s=DEADLINE_S)


class OneEventRunner(ControlledRunner):
    """The mistake: one event for all steps, armed again by each launch."""

    def __init__(self) -> None:
        super().__init__(is_asynchronous=True)
        self.event = threading.Event()

    def launch(self, batch: StepBatch, on_layers: Callable[[int], None]) -> Launched:
        launched = super().launch(batch, on_layers)
        launched.may_end = self.event
        return launched


def launch_two(
    runner: ControlledRunner, reports: Reports
) -> tuple[StepExecutor, Launched, Launched]:
    executor = StepExecutor(runner, reports)
    executor.submit(batch(1))
    executor.submit(batch(2))
    return executor, runner.launched(), runner.launched()


def test_b14_the_waiter_of_a_step_does_not_bind_to_the_next_steps_event(reports: Reports) -> None:
    executor, first, second = launch_two(ControlledRunner(is_asynchronous=True), reports)
    # When the later step's event fires
    second.may_end.set()
    # Then the earlier one is still awaited, and nothing is reported before it
    assert first.may_end is not second.may_end
    assert reports.queue.empty()
    first.may_end.set()
    assert [reports.next()[0], reports.next()[0]] == [1, 2]
    executor.close(timeout_s=DEADLINE_S)


def test_b14_with_one_event_for_all_steps_the_first_ends_with_the_second(reports: Reports) -> None:
    executor, first, second = launch_two(OneEventRunner(), reports)
    second.may_end.set()
    assert reports.next()[0] == 1, "reported as complete although only step 2 was"
    assert first.may_end is second.may_end
    assert reports.next()[0] == 2
    executor.close(timeout_s=DEADLINE_S)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_b14_every_step_on_a_device_records_an_event_of_its_own() -> None:
    events = [_recorded_event() for _ in range(3)]
    torch.cuda.synchronize()
    assert len({id(event) for event in events}) == 3
    assert all(event.query() for event in events)
