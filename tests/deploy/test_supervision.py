"""What supervises may die: the services go on, and are still looked after; and end with the driver.

The failures guarded against: a controller whose death takes traffic along, and one that starts its
services a second time when it is back; and a frozen process, of a service or of the controller,
that keeps its place for ever.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

PROGRAM = Path(__file__).with_name("small_deployment.py")
TIMEOUT_S = 120.0

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(400)]


def named(root: psutil.Process, title: str) -> set[psutil.Process]:
    """Return the processes below ``root`` that Ray calls ``title``."""
    found: set[psutil.Process] = set()
    for process in root.children(recursive=True):
        try:
            if process.cmdline()[:1] and process.cmdline()[0].startswith(title):
                found.add(process)
        except psutil.NoSuchProcess:
            continue
    return found


def wait_for(
    root: psutil.Process, title: str, others_than: set[psutil.Process], count: int
) -> set[psutil.Process]:
    """Wait, bounded, for ``count`` processes called ``title`` that are none of ``others_than``."""
    deadline = time.monotonic() + TIMEOUT_S
    while len(found := named(root, title) - others_than) < count:
        assert time.monotonic() < deadline, f"{title}: {found}"
        time.sleep(0.2)
    return found


def wait_ready(out: Path) -> None:
    """Wait, bounded, until the controller knows the health of all services: before, they load."""
    deadline = time.monotonic() + TIMEOUT_S
    while '"AllReady"' not in out.read_text():
        assert time.monotonic() < deadline, out.read_text()
        time.sleep(0.2)


@pytest.fixture
def program(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[psutil.Process]:
    """Run a deployment of idle services in a private session, and stop it."""
    environment = os.environ | {"TELL_READY": ""} | getattr(request, "param", {})
    with (tmp_path / "out").open("w") as out:
        child = subprocess.Popen(
            [sys.executable, str(PROGRAM), "obey", "obey"], stdout=out, cwd="/", env=environment
        )
    yield psutil.Process(child.pid)
    child.send_signal(signal.SIGINT)
    assert child.wait(TIMEOUT_S) == 0


def test_a_killed_controller_comes_back_and_its_services_never_notice(
    program: psutil.Process,
) -> None:
    services = wait_for(program, "ray::ServiceActor", set(), 2)
    (controller,) = wait_for(program, "ray::Controller", set(), 1)

    # When the controller is killed, then a new one is there, and the services are the same
    controller.kill()
    wait_for(program, "ray::Controller", {controller}, 1)
    assert named(program, "ray::ServiceActor") == services

    # And when a service is killed, the new one starts it anew, and it alone
    lost = services.pop()
    os.kill(lost.pid, signal.SIGKILL)
    wait_for(program, "ray::ServiceActor", {*services, lost}, 1)
    assert len(named(program, "ray::ServiceActor") - {lost}) == 2


@pytest.mark.parametrize("program", [{"PROGRESS_TIMEOUT_S": "10"}], indirect=True)
def test_a_process_that_is_stopped_is_ended_and_started_anew_and_it_alone(
    program: psutil.Process, tmp_path: Path
) -> None:
    services = wait_for(program, "ray::ServiceActor", set(), 2)
    wait_ready(tmp_path / "out")
    frozen = min(services, key=lambda each: each.pid)

    os.kill(frozen.pid, signal.SIGSTOP)
    wait_for(program, "ray::ServiceActor", services, 1)
    frozen.wait(TIMEOUT_S)
    assert named(program, "ray::ServiceActor") >= services - {frozen}


@pytest.mark.parametrize("program", [{"PROGRESS_TIMEOUT_S": "10"}], indirect=True)
def test_a_controller_that_is_stopped_is_ended_and_the_new_one_has_the_same_services(
    program: psutil.Process, tmp_path: Path
) -> None:
    services = wait_for(program, "ray::ServiceActor", set(), 2)
    wait_ready(tmp_path / "out")
    (controller,) = wait_for(program, "ray::Controller", set(), 1)

    os.kill(controller.pid, signal.SIGSTOP)
    wait_for(program, "ray::Controller", {controller}, 1)
    controller.wait(TIMEOUT_S)
    assert named(program, "ray::ServiceActor") == services
