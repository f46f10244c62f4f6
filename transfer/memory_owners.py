"""Which process a pool lies in: a name that no other process of this boot ever has.

The kernel numbers processes and gives the numbers away again, so the start belongs to the name.
"""

import os
from pathlib import Path
from typing import Final

import msgspec

_STARTED_AT_FIELD: Final = 19
"""Of ``/proc/PID/stat``, behind the name: ``starttime`` (proc_pid_stat(5))."""


class MemoryOwner(msgspec.Struct, frozen=True, array_like=True):
    """The process in whose memory a pool lies."""

    pid: int
    pid_namespace: int
    """Inode of the namespace in which ``pid`` is a name."""
    started_at: int
    """In clock ticks since the boot."""


def this_process() -> MemoryOwner | None:
    """Return this process's identity; None where the system does not tell it."""
    try:
        namespace = pid_namespace()
        return MemoryOwner(os.getpid(), namespace, started_at(os.getpid()))
    except (OSError, ValueError, IndexError):
        return None


def pid_namespace() -> int:
    """Return the inode of the namespace in which this process sees others."""
    return Path("/proc/self/ns/pid").stat().st_ino


def started_at(pid: int) -> int:
    """Return when process ``pid`` began.

    Raises:
        OSError: there is no such process.
    """
    # The name of a process may have blanks and brackets in it.
    stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    return int(stat.rpartition(")")[2].split()[_STARTED_AT_FIELD])
