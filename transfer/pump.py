"""Makes the transport's progress from an event loop, as soon as there is some to make."""

import asyncio
from collections import deque
from collections.abc import Callable, Hashable

from transfer.fine_timer import FineTimer
from transfer.transport import ReadOutcome, Transport

_MAX_OUTCOMES_PER_TURN = 32
"""The loop has other work: what else has ended is told in the next turn."""
_FINE_TURNS = 256
_COARSE_INTERVAL_S = 0.001


class Pump:
    """Calls ``poll`` for own reads, ``progress`` for those of peers. The transport has no thread.

    Where it has a ``wake_descriptor``, the loop waits on that: both sides sleep until something has
    come, a source needs not be told who reads, and an idle process does nothing at all.

    Where it has none, this is the one place that polls: only while own reads are outstanding or
    peers say that theirs are, right after a post and each ``interval_s`` from there, each
    millisecond once nothing has come for a while. While nothing is outstanding no timer is set.
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
        self._on_outcome = on_outcome
        self._loop = asyncio.get_running_loop()
        self._descriptor = transport.wake_descriptor
        self._timer: FineTimer | None = None
        self._is_timed = False
        self._soon: asyncio.Handle | None = None
        self._num_quiet_turns = 0
        self._outcomes: deque[ReadOutcome] = deque()
        self._num_reads = 0
        self._drained = asyncio.Event()
        self._readers: set[Hashable] = set()
        self._is_closed = False
        if self._descriptor is None:
            self._timer = FineTimer(self._turn)
        else:
            self._loop.add_reader(self._descriptor, self._wake)
            self.look_soon()  # what came before is not told by the descriptor

    @property
    def is_idle(self) -> bool:
        """Whether it waits for a post, for a reader, or for the descriptor, and for no timer."""
        return self._soon is None and not self._is_timed

    def read_posted(self) -> None:
        """One more read of this process is outstanding; ``on_outcome`` tells its end."""
        self._num_reads += 1
        self.look_soon()

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
        self.look_soon()

    def look_soon(self) -> None:
        """Look in the loop's next turn: over shared memory a read has ended when it was posted."""
        self._num_quiet_turns = 0
        if not self._is_closed and self._soon is None:
            self._soon = self._loop.call_soon(self._turn)

    def look_now(self) -> None:
        """Look at once; only from the loop, and at the end of what the caller does."""
        if not self._is_closed:
            if self._soon is not None:
                self._soon.cancel()
            self._turn()

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
        """Stop for good, before the transport is closed. No outcome is reported any more."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._soon is not None:
            self._soon.cancel()
            self._soon = None
        if self._descriptor is not None:
            self._loop.remove_reader(self._descriptor)
        if self._timer is not None:
            self._is_timed = False
            self._timer.close()

    def _wake(self) -> None:
        if self._soon is None and not self._is_closed:
            self._turn()

    def _turn(self) -> None:
        self._soon = None
        self._is_timed = False
        if self._descriptor is not None or self._readers:
            self._transport.progress()
        if self._descriptor is not None or self._num_reads > len(self._outcomes):
            self._outcomes += self._transport.poll()
        self._wait(found=min(len(self._outcomes), _MAX_OUTCOMES_PER_TURN))
        for _ in range(min(len(self._outcomes), _MAX_OUTCOMES_PER_TURN)):
            outcome = self._outcomes.popleft()
            self.read_ended()
            if self._on_outcome is not None and not self._is_closed:
                self._on_outcome(outcome)

    def _wait(self, *, found: int) -> None:
        """See to it that the next turn comes, with ``found`` outcomes about to be told."""
        if found < len(self._outcomes):
            self.look_soon()
        elif self._timer is None:
            if not self._transport.arm():
                self.look_soon()
        elif self._num_reads > found or self._readers:
            self._num_quiet_turns = 0 if found else self._num_quiet_turns + 1
            is_fine = self._num_quiet_turns <= _FINE_TURNS
            self._is_timed = True
            self._timer.arm(
                self._interval_s if is_fine else max(self._interval_s, _COARSE_INTERVAL_S)
            )
        else:
            self._timer.disarm()
