"""Processes that this one started: finding them and ending them."""

import signal
from collections.abc import Iterable, Sequence

import psutil

TERM_GRACE_S = 1.0
KILL_GRACE_S = 3.0


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
