"""Processes that this one started: finding them, ending them, and dying with a parent."""

import ctypes
import os
import signal
import sys
from collections.abc import Iterable, Sequence

import psutil

PR_SET_PDEATHSIG = 1
"""Source: Linux prctl(2)."""
TERM_GRACE_S = 1.0
KILL_GRACE_S = 3.0


def die_with_parent() -> None:
    """Have the kernel kill this process when the one that started it dies, frozen or not.

    On systems without such a signal nothing happens; there Ray's own checks end an orphan.
    """
    if not sys.platform.startswith("linux"):
        return
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)  # The parent died before the kernel knew.


def with_descendants(roots: Iterable[psutil.Process]) -> list[psutil.Process]:
    """Return ``roots`` and every process below them that still runs."""
    found: list[psutil.Process] = []
    for root in roots:
        try:
            found += [root, *root.children(recursive=True)]
        except psutil.NoSuchProcess:
            continue
    return found


def end_processes(processes: Sequence[psutil.Process]) -> None:
    """End ``processes``: SIGTERM, and SIGKILL for what is left a second later."""
    for process in processes:
        _send(process, signal.SIGTERM)
    _, alive = psutil.wait_procs(processes, timeout=TERM_GRACE_S)
    kill_processes(alive)


def kill_processes(processes: Sequence[psutil.Process]) -> None:
    """SIGKILL ``processes`` and wait, at most three seconds, until they are gone."""
    for process in processes:
        _send(process, signal.SIGKILL)
    psutil.wait_procs(processes, timeout=KILL_GRACE_S)


def _send(process: psutil.Process, number: signal.Signals) -> None:
    try:
        process.send_signal(number)  # psutil checks that the pid is still the same process
    except psutil.NoSuchProcess:
        return
