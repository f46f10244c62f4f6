"""A timer of an event loop that keeps intervals below a millisecond.

``call_later`` of asyncio and uvloop rounds up to whole milliseconds (epoll's unit), which made a
read over TCP four times slower than it is. A Linux ``timerfd`` is exact, and just one more file
descriptor of the loop: no thread, and no wake-up that was not asked for.
"""

import asyncio
import ctypes
import os
import sys
from collections.abc import Callable

_CLOCK_MONOTONIC = 1
_NS_PER_S = 1_000_000_000


class _TimeSpec(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]


class _TimerSpec(ctypes.Structure):
    _fields_ = [("interval", _TimeSpec), ("value", _TimeSpec)]


class FineTimer:
    """Calls ``callback`` once per ``arm``, from the event loop that it was made in.

    Where there is no timerfd (not Linux), it is as coarse as the loop's own timers.
    """

    def __init__(self, callback: Callable[[], None]) -> None:
        self._callback = callback
        self._loop = asyncio.get_running_loop()
        self._coarse: asyncio.TimerHandle | None = None
        self._descriptor: int | None = None
        self._libc: ctypes.CDLL | None = None
        if sys.platform == "linux":
            self._libc = ctypes.CDLL(None, use_errno=True)
            descriptor = int(
                self._libc.timerfd_create(_CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
            )
            if descriptor >= 0:
                self._descriptor = descriptor
                self._loop.add_reader(descriptor, self._fire)

    def arm(self, delay_s: float) -> None:
        """Call back in ``delay_s``, more than 0; what was armed before is forgotten."""
        if self._descriptor is None:
            self.disarm()
            self._coarse = self._loop.call_later(delay_s, self._callback)
            return
        self._set(max(1, round(delay_s * _NS_PER_S)))

    def disarm(self) -> None:
        """Do not call back."""
        if self._coarse is not None:
            self._coarse.cancel()
            self._coarse = None
        if self._descriptor is not None:
            self._set(0)

    def close(self) -> None:
        """Never call back again, and release the descriptor."""
        self.disarm()
        if self._descriptor is not None:
            self._loop.remove_reader(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = None

    def _set(self, nanoseconds: int) -> None:
        assert self._libc is not None
        seconds, rest = divmod(nanoseconds, _NS_PER_S)
        spec = _TimerSpec(_TimeSpec(0, 0), _TimeSpec(seconds, rest))
        if self._libc.timerfd_settime(self._descriptor, 0, ctypes.byref(spec), None) != 0:
            raise OSError(ctypes.get_errno(), "timerfd_settime")

    def _fire(self) -> None:
        if self._descriptor is None:
            return
        try:
            os.read(self._descriptor, 8)
        except BlockingIOError:
            return  # disarmed, or armed anew, after the loop had seen it
        self._callback()
