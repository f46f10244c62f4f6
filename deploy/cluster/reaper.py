"""Cleans up after a driver that was killed: ends its processes and removes its folder.

Runs as a program of its own, in a session of its own. It reads lines from a pipe that only the
driver writes to, one process each, and wakes when the driver ends, however that went.
"""

import shutil
import subprocess
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import IO

import psutil

GRACE_S = 2.0
"""For the parent-death signals, which end most processes already."""
CLOSE_TIMEOUT_S = 5.0


class Reaper:
    """The driver's side: tells the reaper what to end if the driver cannot."""

    def __init__(self, folder: Path) -> None:
        """Start the reaper for ``folder``; from now on the folder is removed with this process."""
        self._process = subprocess.Popen(  # noqa: S603 - our own interpreter and file
            [sys.executable, "-E", __file__, str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            text=True,
        )
        self._told: set[psutil.Process] = set()

    @property
    def pid(self) -> int:
        """Of the reaper's process."""
        return self._process.pid

    def tell(self, processes: Iterable[psutil.Process]) -> None:
        """Add ``processes`` to what the reaper ends."""
        fresh = set(processes) - self._told
        self._told |= fresh
        pipe = self._pipe()
        try:
            pipe.writelines(f"{p.pid} {p.create_time()!r}\n" for p in fresh if p.is_running())
            pipe.flush()
        except (BrokenPipeError, psutil.NoSuchProcess):
            return  # Without a reaper, or for a process just gone, there is nothing to tell.

    def close(self) -> None:
        """Let the reaper finish: it ends what still runs, removes the folder, and exits."""
        with suppress(BrokenPipeError):
            self._pipe().close()
        try:
            self._process.wait(CLOSE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _pipe(self) -> IO[str]:
        assert self._process.stdin is not None, "opened with stdin=PIPE"
        return self._process.stdin


def is_reaper(process: psutil.Process) -> bool:
    """Return whether ``process`` is a driver's reaper."""
    try:
        return __file__ in process.cmdline()
    except psutil.NoSuchProcess:
        return False


def _process_of(line: str) -> psutil.Process | None:
    """Return the process that ``line`` names, if it is still the same one."""
    pid, create_time = line.split()
    try:
        process = psutil.Process(int(pid))
        return process if process.create_time() == float(create_time) else None
    except psutil.NoSuchProcess:
        return None


def _being_started(folder: Path) -> list[psutil.Process]:
    """Return the processes that Ray was starting in ``folder``: nobody could tell of them yet.

    They die with nobody before they have asked for it, and would make the folder anew.
    """
    argument = f"--temp-dir={folder}"
    return [
        process
        for process in psutil.process_iter(["cmdline"])
        if argument in (process.info["cmdline"] or ())
    ]


def reap(lines: Iterable[str], folder: Path) -> None:
    """Read ``lines`` to their end, then end the processes and remove ``folder``."""
    told = list(lines)
    processes = [p for line in told if (p := _process_of(line)) is not None]
    _, alive = psutil.wait_procs(processes, timeout=GRACE_S)
    # After the grace: whoever starts processes is dead by now, or about to be killed.
    _kill(alive)
    _kill(_being_started(folder))
    shutil.rmtree(folder, ignore_errors=True)


def _kill(processes: Iterable[psutil.Process]) -> None:
    alive = list(processes)
    for process in alive:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(alive, timeout=GRACE_S)


if __name__ == "__main__":
    reap(sys.stdin, Path(sys.argv[1]))
