"""However a deployment ends, nothing of it is left; and what dies in it comes back.

The failures guarded against: raylets and gigabytes of workers that outlive a Ctrl-C, a second
start that meets the first one's ports and folders, and a worker that dies and stays dead.
"""

import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

PROGRAM = Path(__file__).with_name("small_deployment.py")
EVENT_TIMEOUT_S = 100.0
STOP_TIMEOUT_S = 100.0
"""Generous: other work may share this machine. The program itself is told 7 seconds."""

pytestmark = [pytest.mark.ray, pytest.mark.timeout(400)]


class SmallDeployment:
    """The program as a child, its events, and every process that it ever had."""

    def __init__(self, *behaviours: str, **environment: str) -> None:
        self.temp = Path(tempfile.mkdtemp(prefix="slt-", dir="/tmp"))
        self.child = subprocess.Popen(
            [sys.executable, str(PROGRAM), *behaviours],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"TMPDIR": str(self.temp)} | environment,
            cwd="/",
        )
        self.pids: dict[str, int] = {}
        self._seen: set[psutil.Process] = set()
        self._events: queue.SimpleQueue[dict[str, object] | None] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.child.stdout is not None
        for line in self.child.stdout:
            if line.startswith("{"):
                self._events.put(json.loads(line))
            else:
                sys.stderr.write(line)  # of Ray
        self._events.put(None)

    def next_event(self) -> dict[str, object]:
        event = self._events.get(timeout=EVENT_TIMEOUT_S)
        assert event is not None, "the program ended"
        self._seen |= set(psutil.Process(self.child.pid).children(recursive=True))
        if event["event"] == "ProcessStarted":
            identity = event["identity"]
            assert isinstance(identity, dict)
            self.pids[str(event["name"])] = identity["pid"]
        return event

    def wait_for(self, kind: str) -> dict[str, object]:
        while (event := self.next_event())["event"] != kind:
            pass
        return event

    def wait_until_up(self, count: int) -> None:
        while len(self.pids) < count:
            self.next_event()

    def end(self) -> int:
        """Return the exit code, once the program has ended."""
        return self.child.wait(STOP_TIMEOUT_S)

    def assert_nothing_left(self) -> None:
        _, alive = psutil.wait_procs(self._seen, timeout=STOP_TIMEOUT_S)
        assert alive == []
        assert list(self.temp.iterdir()) == []

    def clean_up(self) -> None:
        for process in [*self._seen, self.child]:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        self.child.wait()
        self._reader.join()
        shutil.rmtree(self.temp, ignore_errors=True)


@pytest.fixture
def launched() -> Iterator[list[SmallDeployment]]:
    """Collect deployments, and end what a failed test leaves of them."""
    deployments: list[SmallDeployment] = []
    yield deployments
    for deployment in deployments:
        deployment.clean_up()


def launch(
    launched: list[SmallDeployment], *behaviours: str, **environment: str
) -> SmallDeployment:
    launched.append(SmallDeployment(*behaviours, **environment))
    return launched[-1]


@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)]
)
def test_a_stop_signal_ends_everything(
    number: signal.Signals, launched: list[SmallDeployment]
) -> None:
    deployment = launch(launched, "obey", "obey")
    deployment.wait_until_up(2)
    deployment.child.send_signal(number)
    assert deployment.end() == 0
    deployment.assert_nothing_left()


@pytest.mark.slow
def test_a_service_that_does_not_stop_is_killed(launched: list[SmallDeployment]) -> None:
    deployment = launch(launched, "obey", "hang")
    deployment.wait_until_up(2)
    deployment.child.send_signal(signal.SIGINT)
    assert deployment.end() == 0
    deployment.assert_nothing_left()


@pytest.mark.slow
def test_a_frozen_service_does_not_hold_up_the_stop(launched: list[SmallDeployment]) -> None:
    deployment = launch(launched, "obey", "obey")
    deployment.wait_until_up(2)
    os.kill(deployment.pids["decode-0"], signal.SIGSTOP)
    deployment.child.send_signal(signal.SIGINT)
    assert deployment.end() == 0
    deployment.assert_nothing_left()


@pytest.mark.slow
def test_a_second_signal_kills_at_once(launched: list[SmallDeployment]) -> None:
    # Given a stop that waits, for long, for a service which does not stop
    deployment = launch(launched, "obey", "hang", STOP_TIMEOUT_S="300")
    deployment.wait_until_up(2)
    deployment.child.send_signal(signal.SIGINT)
    deployment.wait_for("StopRequested")

    # When the operator loses patience, then the program ends as killed, and leaves nothing
    deployment.child.send_signal(signal.SIGINT)
    assert deployment.end() == 130
    deployment.assert_nothing_left()


def test_nothing_outlives_a_killed_driver_not_even_a_frozen_worker(
    launched: list[SmallDeployment],
) -> None:
    deployment = launch(launched, "obey", "obey")
    deployment.wait_until_up(2)
    os.kill(deployment.pids["decode-0"], signal.SIGSTOP)
    deployment.child.kill()
    assert deployment.end() == -signal.SIGKILL
    deployment.assert_nothing_left()


def test_a_killed_service_is_restarted_while_the_others_go_on(
    launched: list[SmallDeployment],
) -> None:
    # Given a running deployment
    deployment = launch(launched, "obey", "obey", "obey")
    deployment.wait_until_up(3)
    before = dict(deployment.pids)

    # When one service is killed
    os.kill(before["decode-0"], signal.SIGKILL)

    # Then its death is told, and it alone has a new process, which a kill can hit again
    assert deployment.wait_for("ProcessDied")["name"] == "decode-0"
    assert deployment.wait_for("ProcessStarted")["name"] == "decode-0"
    assert deployment.pids["decode-0"] != before["decode-0"]
    assert psutil.pid_exists(before["router"])
    os.kill(deployment.pids["decode-0"], signal.SIGKILL)
    assert deployment.wait_for("ProcessDied")["name"] == "decode-0"
    assert deployment.wait_for("ProcessStarted")["name"] == "decode-0"
    deployment.child.send_signal(signal.SIGINT)
    assert deployment.end() == 0
    deployment.assert_nothing_left()


@pytest.mark.slow
def test_a_crash_is_restarted_but_a_config_error_ends_the_deployment(
    launched: list[SmallDeployment],
) -> None:
    deployment = launch(launched, "obey", "misconfigured")
    error = deployment.wait_for("ConfigError")["error"]
    assert error == "decode-0: cache.num_blocks: none fits"
    assert deployment.end() == 0
    deployment.assert_nothing_left()


@pytest.mark.slow
def test_two_deployments_share_a_machine(launched: list[SmallDeployment]) -> None:
    first, second = launch(launched, "obey"), launch(launched, "obey")
    for deployment in (first, second):
        deployment.wait_until_up(1)
    first.child.send_signal(signal.SIGINT)
    assert first.end() == 0
    first.assert_nothing_left()
    assert psutil.pid_exists(second.pids["router"])
    second.child.send_signal(signal.SIGINT)
    assert second.end() == 0
    second.assert_nothing_left()
