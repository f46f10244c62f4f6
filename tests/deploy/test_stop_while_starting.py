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
import yaml

from core.key_files import write_keys
from deploy.default_model import DEFAULT_MODEL_NAME
from deploy.model_source import cache_folder

ROOT = Path(__file__).parents[2]
PROGRAM = Path(__file__).with_name("small_deployment.py")
TIMEOUT_S = 90.0
ENVIRONMENT = {"STOP_TIMEOUT_S": "60"}
"""Enough for a router that has just begun to hear of its stop, on a machine with other loads."""
UNHEARD = ("Traceback", "WARNING", "ERROR", "Exception", "did not stop in time")

needs_model = pytest.mark.skipif(
    not (cache_folder() / "models" / DEFAULT_MODEL_NAME).is_dir(),
    reason="the default model is not in the cache; run: sluice fetch",
)

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


class Workers:
    """``sluice workers`` with a file and keys, in a session of its own, and what it says."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        write_keys(folder / "keys")
        file = folder / "config.yaml"
        config = {
            "router": {"control_address": "tcp://127.0.0.1:9"},
            "security": {"keys_dir": str(folder / "keys")},
            "engine": {"num_threads": 1},
        }
        file.write_text(yaml.safe_dump(config))
        argv = [sys.executable, "-m", "deploy.main", "workers", "--config", str(file), *arguments]
        self._errors, written = os.pipe()
        self.child = subprocess.Popen(
            argv,
            cwd=ROOT,
            stdout=written,
            stderr=written,
            env={k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"},
            start_new_session=True,
        )
        os.close(written)
        self._read = b""

    @property
    def said(self) -> str:
        """What was read so far: it may end amid a character."""
        return self._read.decode(errors="replace")

    def read_until(self, text: str) -> None:
        """Read, bounded by pytest, what it says, up to ``text`` or its end."""
        while text not in self.said:
            more = os.read(self._errors, 4096)
            assert more, self.said
            self._read += more

    def read_no_more(self) -> None:
        """Close what it writes to, as a ``tee`` does that ends by the same Ctrl-C."""
        os.close(self._errors)

    def ctrl_c(self) -> None:
        """Press it: the whole group hears."""
        os.killpg(self.child.pid, signal.SIGINT)

    def rest(self) -> str:
        """Return what it has said when it is over."""
        while more := os.read(self._errors, 4096):
            self._read += more
        return self.said


@pytest.mark.ucx
@needs_model
@pytest.mark.parametrize(
    ("arguments", "delay_s"), [([], 0.1), ([], 0.8), ([], 3.0), (["--watch"], 0.1)]
)
def test_ctrl_c_while_workers_start_is_quiet_and_leaves_nothing(
    arguments: list[str], delay_s: float, tmp_path: Path
) -> None:
    workers = Workers(tmp_path, *arguments)
    workers.read_until("starting 1 prefill, 1 decode worker(s)")
    seen = psutil.Process(workers.child.pid).children(recursive=True)
    time.sleep(delay_s)  # amid one of the looks at a controller that has not begun, or has

    workers.ctrl_c()
    said = workers.rest()
    assert workers.child.wait(TIMEOUT_S) == 0, said
    _, alive = psutil.wait_procs(seen, timeout=TIMEOUT_S)
    assert alive == []
    # One that has loaded may warn of its router, which is nowhere
    assert [word for word in ("Traceback", "Exception") if word in said] == [], said


@pytest.mark.ucx
@needs_model
def test_a_stop_is_in_order_though_nobody_reads_what_is_said_of_it(tmp_path: Path) -> None:
    workers = Workers(tmp_path)
    workers.read_until("starting 1 prefill, 1 decode worker(s)")
    seen = psutil.Process(workers.child.pid).children(recursive=True)
    workers.read_no_more()

    workers.ctrl_c()
    assert workers.child.wait(TIMEOUT_S) == 0
    _, alive = psutil.wait_procs(seen, timeout=TIMEOUT_S)
    assert alive == []
