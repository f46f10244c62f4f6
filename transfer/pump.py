"""Makes the transport's progress from an event loop, and only while a read is outstanding."""

import asyncio
from collections.abc import Callable, Hashable

from transfer.fine_timer import FineTimer
from transfer.transport import ReadOutcome, Transport

_FINE_TURNS = 256
_COARSE_INTERVAL_S = 0.001


class Pump:
    """Calls ``poll`` while own reads are outstanding, ``progress`` while peers read.

    The transport has no thread of its own (one would spin a core, idle too) and nothing to wait
    on, so this is the one place that polls: right after a post and each ``interval_s`` from there,
    each millisecond once nothing has come for a while. While nothing is outstanding no timer is
    set, and it costs nothing.
    """

    def __init__(
        self,
        transport: Transport,
        *,
        interval_s: float,
        on_outcome: Callable[[ReadOutcome], None] | None = None,
    ) -> None:
        """Belong to the running event loop; ``on_outcome`` is called from it, once per read."""
        self._transport = transport
        self._interval_s = interval_s
        self._num_quiet_turns = 0
        self._on_outcome = on_outcome
        self._loop = asyncio.get_running_loop()
        self._timer = FineTimer(self._turn)
        self._soon: asyncio.Handle | None = None
        self._is_armed = False
        self._num_reads = 0
        self._drained = asyncio.Event()
        self._readers: set[Hashable] = set()
        self._is_closed = False

    @property
    def is_idle(self) -> bool:
        """Whether nothing is outstanding and no timer runs."""
        return not self._is_armed

    def read_posted(self) -> None:
        """One more read of this process is outstanding; ``on_outcome`` tells its end."""
        self._num_reads += 1
        self._hurry()

    def read_ended(self) -> None:
        """A read ended by ``Transport.tear_down``; ``on_outcome`` is not called for it."""
        self._num_reads -= 1
        if self._num_reads == 0:
            self._drained.set()

    def serve(self, reader: Hashable, *, active: bool) -> None:
        """``reader`` says whether reads of it are outstanding. A lost reader is inactive."""
        if not active:
            self._readers.discard(reader)
            return
        self._readers.add(reader)
        self._hurry()

    async def drain(self, *, timeout_s: float) -> bool:
        """Wait until no own read is outstanding; return whether that came within ``timeout_s``.

        For an orderly stop: a source that serves over TCP may not survive that a reader goes away
        in the middle of a read.
        """
        self._drained.clear()
        if self._num_reads <= 0 or self._is_closed:
            return self._num_reads <= 0
        try:
            async with asyncio.timeout(timeout_s):
                await self._drained.wait()
        except TimeoutError:
            return False
        return True

    def close(self) -> None:
        """Stop for good. No outcome is reported any more."""
        if not self._is_closed:
            self._is_closed = True
            self._rest()
            self._timer.close()

    def _hurry(self) -> None:
        """Look at once: over shared memory a read is complete when it was posted."""
        if self._is_closed:
            return
        self._rest()
        self._num_quiet_turns = 0
        self._is_armed = True
        self._soon = self._loop.call_soon(self._turn)

    def _rest(self) -> None:
        self._is_armed = False
        self._timer.disarm()
        if self._soon is not None:
            self._soon.cancel()
            self._soon = None

    def _turn(self) -> None:
        self._is_armed = False
        self._soon = None
        if self._readers:
            self._transport.progress()
        outcomes = self._transport.poll() if self._num_reads > 0 else []
        if outcomes:
            self._num_quiet_turns = 0
        if self._num_reads > len(outcomes) or self._readers:
            self._is_armed = True
            self._timer.arm(self._interval())
        for outcome in outcomes:
            self.read_ended()
            if self._on_outcome is not None and not self._is_closed:
                self._on_outcome(outcome)

    def _interval(self) -> float:
        """Return the time until the next turn: fine while something is likely to end soon."""
        self._num_quiet_turns += 1
        if self._num_quiet_turns <= _FINE_TURNS:
            return self._interval_s
        return max(self._interval_s, _COARSE_INTERVAL_S)
