"""Asks every worker about its prefix cache, or to forget it, and waits for the answers."""

import time
from collections.abc import Callable
from dataclasses import dataclass

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
from router.questions import Questions

ANSWER_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True)
class WorkerCache:
    """What is known of one worker's cache."""

    worker_id: WorkerId
    role: Role
    incarnation: Incarnation
    state: CacheState | None
    """None: the worker did not answer in time, so nothing is known."""


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
        self._incarnation = incarnation
        self._epoch = ""
        self._questions: Questions[CacheReport] = Questions(send, time.monotonic)

    def heard(self, client: ClientId, heartbeat: Heartbeat) -> None:
        """A worker reported over ``client``."""
        self._questions.heard(client, heartbeat)
        self._epoch = newest_epoch((self._epoch, heartbeat.cache_epoch))

    def take(self, report: CacheReport) -> bool:
        """Take an answer; False: nobody waits for it any more."""
        return self._questions.take(report)

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
        replies = await self._questions.ask(
            self._questions.lives(), question_of, timeout_s=ANSWER_TIMEOUT_S
        )
        return [
            WorkerCache(
                reply.life.heartbeat.worker_id,
                reply.life.heartbeat.role,
                reply.life.heartbeat.incarnation,
                None if reply.answer is None else reply.answer.state,
            )
            for reply in replies
        ]
