"""Ctrl-C and SIGTERM: the first asks for a stop, the second ends everything at once.

The first does, too, while there is nothing to be stopped in order.
"""

import os
import signal
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType

import psutil

from deploy.cluster.processes import kill_processes, with_descendants
from deploy.cluster.reaper import is_reaper
from deploy.supervision.events import EventQueue, StopRequested

SIGNALS = (signal.SIGINT, signal.SIGTERM)
EXIT_BY_SIGNAL = 128
"""Plus its number, as shells tell it."""


class StopInterrupt(BaseException):
    """A stop was asked for, by Ctrl-C, SIGTERM or a command.

    No ``Exception``, as ``KeyboardInterrupt`` is none: what goes on after any must not miss it.
    """


class StopSignals:
    """Turns stop signals into ``StopRequested`` events while it is installed."""

    def __init__(self, events: EventQueue) -> None:
        self._events = events
        self.received = False
        """Whether a stop was asked for."""
        self._interrupts = False
        self._ends_all = False

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
        """Handle the signals from now on.

        Again when Ray is up: it calls the former handler of SIGTERM, and aborts 3 s later.
        """
        for number in SIGNALS:
            signal.signal(number, self._on_signal)

    @contextmanager
    def interrupting(self) -> Generator[None]:
        """Let a stop signal end the main thread's waits inside the ``with`` block.

        For no call into Ray: what is raised amid one comes out of it as a ``SystemError``.

        Raises:
            StopInterrupt: a signal came, inside the block or before it.
        """
        try:
            self._interrupts = True  # first: a signal is seen by the check, or by the handler
            self._raise_if_received()
            yield
        finally:
            self._interrupts = False
        self._raise_if_received()  # Python drops what a handler raises amid a finalizer

    @contextmanager
    def ending_all(self) -> Generator[None]:
        """Let the first stop signal inside the ``with`` block end this process and all below it.

        For what cannot be left in the middle, and has nothing yet that must be stopped in order.

        Raises:
            StopInterrupt: a signal came before the block.
        """
        try:
            self._ends_all = True  # first, as above
            self._raise_if_received()
            yield
        finally:
            self._ends_all = False

    def _raise_if_received(self) -> None:
        if self.received:
            raise StopInterrupt

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if self.received or self._ends_all:
            _kill_everything(EXIT_BY_SIGNAL + number)
        self.received = True
        # SimpleQueue.put is reentrant, so a handler may call it.
        self._events.put(StopRequested())
        if self._interrupts:
            raise StopInterrupt


def _kill_everything(code: int) -> None:
    """SIGKILL every process below this one and leave; the reaper alone stays, and cleans up."""
    children = psutil.Process().children()
    kill_processes(with_descendants(c for c in children if not is_reaper(c)))
    os._exit(code)
