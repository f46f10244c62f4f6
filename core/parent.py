"""A process that does not outlive the one that started it."""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
"""Source: Linux prctl(2)."""


def die_with_parent() -> None:
    """Have the kernel kill this process when the one that started it dies, frozen or not.

    Linux counts the *thread* that started it as the parent. On systems without such a signal
    nothing happens; there a closed connection must end an orphan.
    """
    if not sys.platform.startswith("linux"):
        return
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)  # The parent died before the kernel knew.
