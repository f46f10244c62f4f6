"""The end of a service, and its health: what whoever supervises a process asks of it.

Everything here is about one process. Who decides when it has to end is not: see ``deploy``.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

from core.bounds import MAX_SECONDS
from core.ids import Incarnation
from core.messages import DesiredWorkers
from core.tasks import run_until

TICK_S = 1.0
DRAIN_NOTICE_S = 1.0
"""A draining service stays for so long though it is idle: what was sent to it before its peers
heard of the drain gets an answer instead of a lost connection."""


@dataclass(frozen=True, slots=True)
class WorkerHealth:
    """One look at a process; cheap, and the same whether the process works or stands still."""

    state: Literal["starting", "ready", "draining"]
    incarnation: Incarnation | None
    """None while starting."""
    is_idle: bool
    """Nothing is running, waiting, held for a reader, or being read: it may stop."""
    silence_s: float
    """How long ago the process last proved progress: the age of the oldest step in flight that has
    not completed, or of the event loop's last tick; small when healthy, 0 while starting."""
    num_steps: int
    """Completed since the start."""


def _no_steps() -> int:
    return 0


def _nothing_in_flight() -> None:
    return None


@dataclass(frozen=True, slots=True)
class Work:
    """What a service that has started is asked, from any thread."""

    incarnation: Incarnation
    is_idle: Callable[[], bool]
    num_steps: Callable[[], int] = _no_steps
    """Completed."""
    oldest_step_at: Callable[[], float | None] = _nothing_in_flight
    """When the oldest step in flight was submitted, by ``time.monotonic``; None: none is."""


class Lifecycle:
    """Shared by a service and its supervisor. The events belong to the service's event loop.

    starting ──run──> ready ──drain──> draining ──idle──> over
        └───────────────┴────────stop─────┴──────────────> over
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.stop = asyncio.Event()
        """End now."""
        self.drain = asyncio.Event()
        """Take nothing new, finish what there is, then end."""
        self.desired: DesiredWorkers | None = None
        """What the controller has told last; None: nothing yet."""
        self._heard_at: float | None = None
        """When that was."""
        self._clock = clock
        self._work: Work | None = None
        self._last_tick = clock()
        self._changed = asyncio.Event()

    def health(self) -> WorkerHealth:
        """Return how the service is. Any thread may call this."""
        work = self._work
        if work is None:
            return WorkerHealth("starting", None, is_idle=True, silence_s=0.0, num_steps=0)
        submitted_at = work.oldest_step_at()
        since = self._last_tick if submitted_at is None else min(self._last_tick, submitted_at)
        return WorkerHealth(
            state="draining" if self.drain.is_set() else "ready",
            incarnation=work.incarnation,
            is_idle=work.is_idle(),
            silence_s=max(0.0, self._clock() - since),
            num_steps=work.num_steps(),
        )

    def hear(self, desired: DesiredWorkers) -> None:
        """Take what the controller tells with each question after the health. Any thread may."""
        self.desired, self._heard_at = desired, self._clock()

    def controller_silence_s(self) -> float | None:
        """Return how long ago the controller was heard; None: never, so there may be none."""
        heard_at = self._heard_at
        return None if heard_at is None else min(self._clock() - heard_at, MAX_SECONDS)

    def changed(self) -> None:
        """Something has ended: a drain may be over. Cheap enough for every step."""
        if self.drain.is_set():
            self._changed.set()

    async def run(self, work: Work, *parts: Coroutine[Any, Any, None]) -> None:
        """Run the service's ``parts`` until ``stop``, the end of a drain, or the end of a part.

        Raises:
            Exception: what the part or callback that ended first raised.
        """
        self._begin(work)
        await run_until(self.stop, self._tick(), self._drained(work), *parts)

    async def wait_end(self, work: Work, *tasks: asyncio.Task[None]) -> None:
        """Return at ``stop``, at the end of a drain, or when one of ``tasks`` is done.

        For a service whose callbacks may fail one by one, as those of an HTTP server.
        """
        self._begin(work)
        own = {
            asyncio.create_task(part)
            for part in (self.stop.wait(), self._tick(), self._drained(work))
        }
        try:
            await asyncio.wait({*own, *tasks}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in own:
                task.cancel()
            await asyncio.gather(*own, return_exceptions=True)

    def _begin(self, work: Work) -> None:
        self._last_tick = self._clock()
        self._work = work

    async def _tick(self) -> None:
        while True:
            self._last_tick = self._clock()
            await asyncio.sleep(TICK_S)

    async def _drained(self, work: Work) -> None:
        await self.drain.wait()
        await asyncio.sleep(DRAIN_NOTICE_S)
        while not work.is_idle():
            self._changed.clear()
            # Bounded: a lease that runs out need not tell.
            with suppress(TimeoutError):
                async with asyncio.timeout(TICK_S):
                    await self._changed.wait()
