"""Child processes that leave nothing behind, whatever they started themselves."""

import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import psutil

from core.errors import SluiceError

_PR_SET_CHILD_SUBREAPER = 36
"""From linux/prctl.h: orphans below this process become its children, so that it can end them."""
_KILL_WAIT_S = 10.0
_POLL_S = 0.25


class StartError(SluiceError):
    """A process of a measured system ended, or was not ready in time."""


def adopt_orphans() -> None:
    """Make this process the new parent of every orphan below it (Linux)."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")


class ProcessTree:
    """One command and all its descendants, those that outlive their parents too.

    Only one tree can be told from another while its root lives: start and stop trees of one
    system together. The command runs in a session of its own, so that Ctrl-C reaches only us.
    """

    def __init__(
        self, command: Sequence[str], *, environment: Mapping[str, str], cwd: Path, log: Path
    ) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        self.log = log
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=cwd,
                env={**os.environ, **environment},
                start_new_session=True,
            )

    def wait_ready(self, is_ready: Callable[[], bool], *, timeout_s: float) -> None:
        """Return when ``is_ready`` is true.

        Raises:
            StartError: the command ended first, or ``timeout_s`` passed.
        """
        deadline = time.monotonic() + timeout_s
        while not is_ready():
            if self._process.poll() is not None:
                raise StartError(f"exit code {self._process.returncode}: {self.last_lines()}")
            if time.monotonic() > deadline:
                raise StartError(f"not ready after {timeout_s:.0f} s: {self.last_lines()}")
            time.sleep(_POLL_S)

    def wait(self, *, timeout_s: float) -> None:
        """Return when the command has ended well.

        Raises:
            StartError: it ended with an error, or did not end within ``timeout_s``.
        """
        try:
            code = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired as error:
            raise StartError(f"still running after {timeout_s:.0f} s") from error
        if code != 0:
            raise StartError(f"exit code {code}: {self.last_lines()}")

    def terminate(self) -> None:
        """Ask the command to end."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)

    def ended_within(self, timeout_s: float) -> bool:
        """Wait for the command itself; tell whether it has ended."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def last_lines(self, count: int = 3) -> str:
        """Return the end of what the command printed, on one line."""
        text = self.log.read_text(encoding="utf-8", errors="replace")
        return " | ".join(line.strip() for line in text.splitlines()[-count:]) + f" ({self.log})"


def descendants() -> list[psutil.Process]:
    """Return every live process below this one."""
    return [p for p in psutil.Process().children(recursive=True) if _is_live(p)]


def kill_descendants() -> int:
    """Kill every process below this one, and return how many there were."""
    left = descendants()
    killed = len(left)
    deadline = time.monotonic() + _KILL_WAIT_S
    while left and time.monotonic() < deadline:
        for process in left:
            _kill(process)
        psutil.wait_procs(left, timeout=1.0)
        left = descendants()
    _reap()
    return killed


def memory_mib(processes: Sequence[psutil.Process]) -> float:
    """Return their proportional set size: shared pages are counted once in all."""
    total = 0
    for process in processes:
        try:
            total += process.memory_full_info().pss
        except psutil.Error:
            continue
    return total / 2**20


def cpu_seconds(processes: Sequence[psutil.Process]) -> float:
    """Return the CPU time that ``processes`` have used so far."""
    total = 0.0
    for process in processes:
        try:
            times = process.cpu_times()
        except psutil.Error:
            continue
        total += times.user + times.system
    return total


def _is_live(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _kill(process: psutil.Process) -> None:
    try:
        process.kill()
    except psutil.NoSuchProcess:
        return


def _reap() -> None:
    """Collect the exit codes of orphans that became our children."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            continue
    except ChildProcessError:
        return
