"""What cleans up after a killed driver.

The failure guarded against: a process that Ray was just starting, which nobody had told the reaper
of, outlives it and makes the session's folder anew.
"""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy.cluster.reaper import reap

SLEEPS = "import time; time.sleep(60)"


@pytest.fixture
def sleepers(tmp_path: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Return one that Ray starts in the folder, one of another session, and one who looks on."""
    arguments = [f"--temp-dir={tmp_path}/s", f"--temp-dir={tmp_path}/s2", f"{tmp_path}/s/log"]
    processes = [subprocess.Popen([sys.executable, "-c", SLEEPS, one]) for one in arguments]
    yield processes
    for process in processes:
        process.kill()
        process.wait()


def test_what_was_being_started_ends_with_the_session_and_nobody_else(
    tmp_path: Path, sleepers: list[subprocess.Popen[bytes]]
) -> None:
    folder = tmp_path / "s"
    folder.mkdir()
    reap([], folder)
    sleepers[0].wait(60)
    assert [process.poll() is None for process in sleepers] == [False, True, True]
    assert not folder.exists()
