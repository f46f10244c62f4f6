"""Ctrl-C and SIGTERM: the first asks for a stop, the second ends everything at once."""

import os
import signal
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType

import psutil

from deploy.cluster.processes import kill_processes, with_descendants
from deploy.cluster.reaper import is_reaper
from deploy.supervision.events import EventQueue, StopRequested

EXIT_KILLED = 130
SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopInterrupt(Exception):  # noqa: N818 - not an error, but the way out of a wait
    """A stop signal came inside ``StopSignals.interrupting``."""


class StopSignals:
    """Turns stop signals into ``StopRequested`` events while it is installed."""

    def __init__(self, events: EventQueue) -> None:
        self._events = events
        self.received = False
        """Whether a stop was asked for."""
        self._interrupts = False

    @contextmanager
    def installed(self) -> Generator[None]:
        """Handle the signals for the time of the ``with`` block."""
        previous = {number: signal.getsignal(number) for number in SIGNALS}
        self.install()
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def install(self) -> None:
        """Handle the signals from now on. Again after ``ray.init``, which takes SIGTERM."""
        for number in SIGNALS:
            signal.signal(number, self._on_signal)

    @contextmanager
    def interrupting(self) -> Generator[None]:
        """Let a stop signal end the main thread's waits inside the ``with`` block.

        Raises:
            StopInterrupt: a signal came, inside the block or before it.
        """
        if self.received:
            raise StopInterrupt
        self._interrupts = True
        try:
            yield
        finally:
            self._interrupts = False

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        if self.received:
            _kill_everything()
        self.received = True
        # SimpleQueue.put is reentrant, so a handler may call it.
        self._events.put(StopRequested())
        if self._interrupts:
            raise StopInterrupt


def _kill_everything() -> None:
    """SIGKILL every process below this one and leave; the reaper alone stays, and cleans up."""
    children = psutil.Process().children()
    kill_processes(with_descendants(c for c in children if not is_reaper(c)))
    os._exit(EXIT_KILLED)
