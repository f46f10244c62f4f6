"""Makes the transport's progress from an event loop, and only while a read is outstanding."""

import asyncio
from collections.abc import Callable, Hashable

from transfer.transport import ReadOutcome, Transport

_MAX_INTERVAL_S = 0.001


class Pump:
    """Calls ``poll`` while own reads are outstanding, ``progress`` while peers read.

    The transport has no thread of its own (one would spin a core, idle too) and nothing to wait
    on, so this is the one place that polls: soon after a post and each ``interval_s`` from there,
    slower while nothing comes. While nothing is outstanding it has no timer, and costs nothing.
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
        self._max_interval_s = max(interval_s, _MAX_INTERVAL_S)
        self._next_interval_s = interval_s
        self._on_outcome = on_outcome
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.Handle | None = None
        self._num_reads = 0
        self._readers: set[Hashable] = set()
        self._is_closed = False

    @property
    def is_idle(self) -> bool:
        """Whether nothing is outstanding and no timer runs."""
        return self._timer is None

    def read_posted(self) -> None:
        """One more read of this process is outstanding; ``on_outcome`` tells its end."""
        self._num_reads += 1
        self._hurry()

    def read_ended(self) -> None:
        """A read ended by ``Transport.tear_down``; ``on_outcome`` is not called for it."""
        self._num_reads -= 1

    def serve(self, reader: Hashable, *, active: bool) -> None:
        """``reader`` says whether reads of it are outstanding. A lost reader is inactive."""
        if not active:
            self._readers.discard(reader)
            return
        self._readers.add(reader)
        self._hurry()

    def close(self) -> None:
        """Stop for good. No outcome is reported any more."""
        self._is_closed = True
        self._cancel()

    def _hurry(self) -> None:
        """Look at once: over shared memory a read is complete when it was posted."""
        if self._is_closed:
            return
        self._cancel()
        self._next_interval_s = self._interval_s
        self._timer = self._loop.call_soon(self._turn)

    def _cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _turn(self) -> None:
        self._timer = None
        if self._readers:
            self._transport.progress()
        outcomes = self._transport.poll() if self._num_reads > 0 else []
        if outcomes:
            self._next_interval_s = self._interval_s
        if self._num_reads > len(outcomes) or self._readers:
            self._timer = self._loop.call_later(self._next_interval_s, self._turn)
            self._next_interval_s = min(self._next_interval_s * 1.5, self._max_interval_s)
        for outcome in outcomes:
            self._num_reads -= 1
            if self._on_outcome is not None:
                self._on_outcome(outcome)
