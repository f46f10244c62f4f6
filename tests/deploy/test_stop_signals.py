"""What Ctrl-C and SIGTERM do to the process that they are sent to, and to those below it.

The failures guarded against: a stop that is not heard, by a process that waits for something else
or just goes on after an exception; and a process that is left behind where a stop ends all at once.
"""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from deploy.supervision.events import EventQueue, StopRequested
from deploy.supervision.stop_signals import SIGNALS, StopInterrupt, StopSignals

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 60.0
WAITS = """
import subprocess, sys, threading
from deploy.supervision.events import EventQueue
from deploy.supervision.stop_signals import StopSignals

signals = StopSignals(EventQueue())
with signals.installed(), signals.ending_all():
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    print(child.pid, flush=True)
    threading.Event().wait()
"""


ENTERS = """
import os, signal
from deploy.supervision.events import EventQueue
from deploy.supervision.stop_signals import StopSignals

class Signals(StopSignals):
    def _raise_if_received(self):
        super()._raise_if_received()
        os.kill(os.getpid(), signal.SIGTERM)

signals = Signals(EventQueue())
with signals.installed(), signals.ending_all():
    print("it goes on", flush=True)
"""


def _wait_and_be_stopped(signals: StopSignals) -> None:
    with signals.interrupting():
        os.kill(os.getpid(), signal.SIGINT)
        signal.pause()


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_is_an_event_and_no_more(number: int) -> None:
    events = EventQueue()
    signals = StopSignals(events)
    before = signal.getsignal(number)
    with signals.installed():
        os.kill(os.getpid(), number)
        assert isinstance(events.get(timeout=TIMEOUT_S), StopRequested)
    assert signals.received
    assert signal.getsignal(number) is before


def test_a_signal_leaves_a_wait_that_may_be_interrupted() -> None:
    signals = StopSignals(EventQueue())
    with signals.installed(), pytest.raises(StopInterrupt):
        _wait_and_be_stopped(signals)


@pytest.mark.parametrize("block", ["interrupting", "ending_all"])
def test_a_signal_that_came_before_a_block_is_not_lost(block: str) -> None:
    signals = StopSignals(EventQueue())
    with signals.installed():
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(StopInterrupt), getattr(signals, block)():
            pytest.fail("it was entered")


def test_a_signal_just_after_the_last_look_for_one_still_leaves_the_block(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    signals = StopSignals(EventQueue())
    look = signals._raise_if_received

    def look_and_be_stopped() -> None:
        look()
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(signals, "_raise_if_received", look_and_be_stopped)
    with signals.installed(), pytest.raises(StopInterrupt), signals.interrupting():
        pytest.fail("it was entered")


def test_a_signal_just_after_the_last_look_for_one_still_ends_all() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", ENTERS],
        cwd=ROOT,
        capture_output=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (128 + signal.SIGTERM, b"", b"")


def test_a_stop_passes_through_what_goes_on_after_any_exception() -> None:
    signals = StopSignals(EventQueue())
    with signals.installed(), pytest.raises(StopInterrupt), suppress(Exception):
        _wait_and_be_stopped(signals)


@pytest.mark.parametrize("number", SIGNALS)
def test_where_nothing_can_be_stopped_in_order_all_ends_at_once_and_quietly(number: int) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", WAITS],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    below = psutil.Process(int(process.stdout.readline()))
    process.send_signal(number)
    _, errors = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 128 + number
    assert errors == ""
    below.wait(TIMEOUT_S)
