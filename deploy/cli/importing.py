"""Ctrl-C amid imports, which take a second: some libraries make an error of their own of it."""

import os
import signal
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType

from deploy.exit_codes import EXIT_INTERRUPTED


@contextmanager
def ended_by_ctrl_c() -> Generator[None]:
    """Let Ctrl-C end the process at once inside the ``with`` block, without a word.

    In the main thread. Where Ctrl-C is ignored or handled, that stays.
    """
    previous = signal.getsignal(signal.SIGINT)
    if previous is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, _end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


def _end(_number: int, _frame: FrameType | None) -> None:
    os._exit(EXIT_INTERRUPTED)
