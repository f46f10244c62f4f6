"""Ends a process whose acting thread hangs, though its other threads answer.

Whoever asks such a process hears that all is well; only the process itself can know.
"""

import logging
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import PurePath
from threading import Thread

from deploy.cluster.bounded import run_bounded

log = logging.getLogger(__name__)

LOOK_S = 1.0
TELL_TIMEOUT_S = 2.0
"""For the log line: the thread that hangs may hold the lock of the log."""
MAX_FRAMES = 12
"""Of a stack that are told, the innermost."""


@dataclass(slots=True)
class StallCounter:
    """Counts looks at a progress that stays the same. Pure, and without a clock.

    A process that was suspended, or that had no processor, has not looked meanwhile, so that it
    finds nobody guilty when it goes on.
    """

    limit: int
    """So many looks in a row without progress are too many."""
    _progress: int | None = None
    _num_same: int = 0

    def look(self, progress: int) -> bool:
        """Take note of ``progress``; return whether it has stood still for too long."""
        self._num_same = self._num_same + 1 if progress == self._progress else 0
        self._progress = progress
        return self._num_same >= self.limit


def watch(
    acting: Thread, progress: Callable[[], int], end: Callable[[], None], limit_s: float
) -> None:
    """Call ``end``, in a thread of its own, when ``acting`` lives and hangs.

    Args:
        acting: Has been started. When it has ended, nothing is watched any more.
        progress: Differs from look to look while ``acting`` gets on. Never waits.
        end: Ends the process. Called after a line in the log that says where ``acting`` stands.
        limit_s: Without progress, by this thread's own looks.
    """
    counter = StallCounter(round(limit_s / LOOK_S))

    def run() -> None:
        while not _has_ended(acting):
            if counter.look(progress()):
                with suppress(Exception):
                    run_bounded(lambda: _tell(acting, limit_s), timeout_s=TELL_TIMEOUT_S)
                end()
                return

    Thread(target=run, name=f"{acting.name}-watchdog", daemon=True).start()


def stack_of(thread: Thread) -> str:
    """Return where ``thread`` stands: ``file:line:function;...``, the innermost last; no space."""
    frames = sys._current_frames()  # noqa: SLF001  # pyright: ignore[reportPrivateUsage] - documented
    frame = frames.get(thread.ident or 0)
    stack = traceback.extract_stack(frame)[-MAX_FRAMES:] if frame is not None else []
    return ";".join(f"{PurePath(at.filename).name}:{at.lineno}:{at.name}" for at in stack)


def _has_ended(thread: Thread) -> bool:
    """Wait for one look's time, or until ``thread`` has ended; return whether it has."""
    thread.join(LOOK_S)
    return not thread.is_alive()


def _tell(acting: Thread, limit_s: float) -> None:
    log.critical(
        "event=stalled service=%s silence_s=%.0f stack=%s", acting.name, limit_s, stack_of(acting)
    )
