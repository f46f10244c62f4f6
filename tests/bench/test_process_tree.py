"""A measured system may leave daemons behind; the benchmark must not."""

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from bench.process_tree import ProcessTree, StartError

ROOT = Path(__file__).parents[2]

LEAVE_A_DAEMON = """
import os, signal, time
reading, writing = os.pipe()
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print(os.getpid(), flush=True)
        os.write(writing, b"!")
        time.sleep(60)
    os._exit(0)
os.read(reading, 1)
os.wait()
"""

MEASURE_IT = f"""
import sys
from pathlib import Path
from bench.process_tree import ProcessTree, adopt_orphans, descendants, kill_descendants
adopt_orphans()
log = Path(sys.argv[1])
tree = ProcessTree([sys.executable, "-c", {LEAVE_A_DAEMON!r}], environment={{}}, cwd=log.parent,
                   log=log)
tree.wait(timeout_s=20)
assert kill_descendants() == 1
assert descendants() == []
"""


def test_daemon_that_outlives_its_parent_and_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    # In a process of its own, which becomes the parent of all orphans below it
    log = tmp_path / "log"
    subprocess.run([sys.executable, "-c", MEASURE_IT, log], check=True, cwd=ROOT, timeout=60)

    assert not psutil.pid_exists(int(log.read_text()))


def test_command_that_ends_early_is_reported_with_its_last_words(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import sys; sys.exit('port is taken')"]
    tree = ProcessTree(command, environment={}, cwd=tmp_path, log=tmp_path / "log")

    with pytest.raises(StartError, match="exit code 1: port is taken"):
        tree.wait_ready(lambda: False, timeout_s=30)


def test_command_that_never_gets_ready_is_given_up(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    tree = ProcessTree(command, environment={}, cwd=tmp_path, log=tmp_path / "log")

    with pytest.raises(StartError, match="not ready after 0 s"):
        tree.wait_ready(lambda: False, timeout_s=0.1)

    tree.terminate()
    assert tree.ended_within(20)
