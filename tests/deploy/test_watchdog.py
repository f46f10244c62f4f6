"""A controller that hangs ends itself, and one that was suspended or has much to do does not.

The failures guarded against: a thread that hangs in a call while the others answer, so that nobody
notices that no dead worker is started anew; a watchdog that ends a healthy process when it has
stood still itself, or that hangs beside the thread that it watches.
"""

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from deploy.supervision import watchdog as module
from deploy.supervision.watchdog import StallCounter, stack_of, watch

WAIT_S = 60.0


class Acting:
    """A thread that hangs until it is let go."""

    def __init__(self) -> None:
        self._go = threading.Event()
        self.is_there = threading.Event()
        self.thread = threading.Thread(target=self._hang_here, name="acting", daemon=True)
        self.num_moves = 0
        self.num_looks = 0
        self.ended = threading.Event()

    def _hang_here(self) -> None:
        self.is_there.set()
        self._go.wait(WAIT_S)

    def progress(self) -> int:
        self.num_looks += 1
        return self.num_moves

    def watch(self, limit_s: float) -> None:
        watch(self.thread, self.progress, self.ended.set, limit_s)

    @contextmanager
    def running(self) -> Iterator[None]:
        self.thread.start()
        assert self.is_there.wait(WAIT_S)
        try:
            yield
        finally:
            self._go.set()
            self.thread.join(WAIT_S)


@pytest.fixture
def acting(monkeypatch: pytest.MonkeyPatch) -> Acting:
    monkeypatch.setattr(module, "LOOK_S", 0.02)
    return Acting()


def test_the_same_progress_is_too_much_after_as_many_looks_as_the_limit() -> None:
    counter = StallCounter(limit=3)
    assert [counter.look(7) for _ in range(5)] == [False, False, False, True, True]


def test_whoever_gets_on_however_slowly_is_not_stalled() -> None:
    counter = StallCounter(limit=3)
    slowly = [progress for progress in range(20) for _ in range(3)]
    assert not any(counter.look(progress) for progress in slowly)


def test_a_process_that_was_suspended_is_not_blamed_for_the_time_that_it_has_not_looked() -> None:
    """No clock is read: an hour without a look is one look."""
    counter = StallCounter(limit=3)
    assert not counter.look(1)
    assert not counter.look(1)
    assert not counter.look(1)  # the first after an hour
    assert not counter.look(2)  # and the thread has had time, too


def test_a_thread_that_hangs_is_told_with_its_stack_and_ended(
    acting: Acting, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "TELL_TIMEOUT_S", WAIT_S)
    with caplog.at_level(logging.CRITICAL, module.__name__), acting.running():
        acting.watch(0.1)
        assert acting.ended.wait(WAIT_S)
        (line,) = [record.getMessage() for record in caplog.records]
        assert line.startswith("event=stalled service=acting ")
        stack = line.split("stack=")[1]
        assert ":_hang_here" in stack
        assert " " not in stack


def test_a_thread_that_has_ended_is_watched_no_more(acting: Acting) -> None:
    with acting.running():
        acting.watch(WAIT_S)
    for watching in [t for t in threading.enumerate() if t.name == "acting-watchdog"]:
        watching.join(WAIT_S)
        assert not watching.is_alive()
    assert not acting.ended.is_set()


def test_a_log_that_hangs_with_the_thread_keeps_nobody_from_ending_the_process(
    acting: Acting, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = threading.Event()
    monkeypatch.setattr(module, "TELL_TIMEOUT_S", 0.05)
    monkeypatch.setattr(module.log, "critical", lambda *_: held.wait(WAIT_S))
    with acting.running():
        acting.watch(0.1)
        assert acting.ended.wait(WAIT_S / 2)
    held.set()


def test_a_log_that_fails_keeps_nobody_from_ending_the_process(
    acting: Acting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_tell", lambda *_: 1 / 0)
    with acting.running():
        acting.watch(0.1)
        assert acting.ended.wait(WAIT_S)


def test_the_stack_of_a_thread_that_is_gone_is_empty(acting: Acting) -> None:
    with acting.running():
        pass
    assert stack_of(acting.thread) == ""
