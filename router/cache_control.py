"""Asks every worker about its prefix cache, or to forget it, and waits for the answers."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

from core.cache_epoch import epoch_after, newest_epoch
from core.channel import ClientId
from core.ids import Incarnation, WorkerId
from core.messages import (
    AnyMessage,
    CacheReport,
    CacheState,
    Heartbeat,
    ResetCache,
    Role,
    ShowCache,
)

ANSWER_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True)
class WorkerCache:
    """What is known of one worker's cache."""

    worker_id: WorkerId
    role: Role
    incarnation: Incarnation
    state: CacheState | None
    """None: the worker did not answer in time, so nothing is known."""


@dataclass(frozen=True, slots=True)
class _Life:
    """The newest process of a worker, and the connection over which it reports."""

    client: ClientId
    heartbeat: Heartbeat


@dataclass(eq=False)
class _Question:
    missing: set[Incarnation]
    states: dict[Incarnation, CacheState] = field(default_factory=dict[Incarnation, CacheState])
    is_answered: asyncio.Event = field(default_factory=asyncio.Event)


class CacheControl:
    """Owned by one event loop.

    A worker that fell silent is asked all the same, and told as unreachable, until another life
    of it reports: it may come back with its cache as it was.

    Args:
        send: Queues a message to one worker's connection; lost where that is gone.
        incarnation: The router's; what its resets begin is named after it.
    """

    def __init__(
        self, send: Callable[[ClientId, AnyMessage], None], *, incarnation: Incarnation
    ) -> None:
        self._send = send
        self._incarnation = incarnation
        self._epoch = ""
        self._lives: dict[WorkerId, _Life] = {}
        self._numbers = count(1)
        self._questions: dict[int, _Question] = {}

    def heard(self, client: ClientId, heartbeat: Heartbeat) -> None:
        """A worker reported over ``client``."""
        self._lives[heartbeat.worker_id] = _Life(client, heartbeat)
        self._epoch = newest_epoch((self._epoch, heartbeat.cache_epoch))

    def take(self, report: CacheReport) -> bool:
        """Take an answer; False: nobody waits for it any more."""
        question = self._questions.get(report.number)
        if question is None or report.incarnation not in question.missing:
            return False
        question.missing.discard(report.incarnation)
        question.states[report.incarnation] = report.state
        if not question.missing:
            question.is_answered.set()
        return True

    async def reset(self) -> list[WorkerCache]:
        """Have every worker forget its cache, and return how far each one is.

        All begin the same epoch, newer than that of any reset that a worker has told of, so they go
        on sharing what they store.
        """
        self._epoch = epoch = epoch_after(self._epoch, by=self._incarnation)
        return await self._ask(lambda number: ResetCache(number, epoch))

    async def show(self) -> list[WorkerCache]:
        """Return the state of every worker's cache."""
        return await self._ask(ShowCache)

    async def _ask(self, question_of: Callable[[int], ResetCache | ShowCache]) -> list[WorkerCache]:
        """Ask all known workers; the wait for answers is bounded by ``ANSWER_TIMEOUT_S``."""
        lives = sorted(self._lives.values(), key=lambda life: life.heartbeat.worker_id)
        number = next(self._numbers)
        question = _Question({life.heartbeat.incarnation for life in lives})
        self._questions[number] = question
        try:
            for life in lives:
                self._send(life.client, question_of(number))
            if lives:
                async with asyncio.timeout(ANSWER_TIMEOUT_S):
                    await question.is_answered.wait()
        except TimeoutError:
            pass  # whoever is still missing is told as unreachable
        finally:
            del self._questions[number]
        return [
            WorkerCache(
                life.heartbeat.worker_id,
                life.heartbeat.role,
                life.heartbeat.incarnation,
                question.states.get(life.heartbeat.incarnation),
            )
            for life in lives
        ]
