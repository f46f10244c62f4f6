"""A stop of what has not begun to serve: nothing is waited for, and nothing looks like a failure.

The failures guarded against: the whole time to stop spent on a service that loads, and hears
nothing, or that has no room; and a warning or a stack for what was only told to stop.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

PROGRAM = Path(__file__).with_name("small_deployment.py")
TIMEOUT_S = 90.0
ENVIRONMENT = {"STOP_TIMEOUT_S": "25"}
"""Enough for a router that has just begun to hear of its stop, on a machine with other loads."""
UNHEARD = ("Traceback", "WARNING", "ERROR", "Exception", "did not stop in time")

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(300)]


def below(root: psutil.Process, title: str) -> list[psutil.Process]:
    """Return the processes below ``root`` that Ray calls ``title``."""
    found: list[psutil.Process] = []
    for process in root.children(recursive=True):
        try:
            if any(title in part for part in process.cmdline()[:1]):
                found.append(process)
        except psutil.NoSuchProcess:
            continue
    return found


@pytest.mark.parametrize(
    ("behaviours", "title", "count", "codes"),
    [
        (["obey", "obey"], "gcs_server", 1, {0, 130}),
        (["obey", "obey"], "raylet", 1, {0, 130}),
        (["obey", "obey"], "ray::Controller", 1, {0}),
        (["obey", "load"], "ray::ServiceActor", 2, {0}),
        (["load", "obey", "no_room"], "ray::ServiceActor", 2, {0}),
    ],
    ids=["Ray starts", "Ray joins", "the controller begins", "one loads", "one has no room"],
)
def test_a_stop_before_all_serve_is_quiet_and_leaves_nothing(
    behaviours: list[str], title: str, count: int, codes: set[int], tmp_path: Path
) -> None:
    log = tmp_path / "log"
    with log.open("w") as out:
        child = subprocess.Popen(
            [sys.executable, str(PROGRAM), *behaviours],
            stdout=out,
            stderr=out,
            cwd="/",
            env=os.environ | ENVIRONMENT,
        )
    root = psutil.Process(child.pid)
    deadline = time.monotonic() + TIMEOUT_S
    while len(below(root, title)) < count:
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.05)
    seen = root.children(recursive=True)

    child.send_signal(signal.SIGINT)
    assert child.wait(TIMEOUT_S) in codes, log.read_text()
    _, alive = psutil.wait_procs(seen, timeout=TIMEOUT_S)
    assert alive == []
    said = log.read_text()
    assert [word for word in UNHEARD if word in said] == [], said
