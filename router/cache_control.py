"""Asks every worker about its prefix cache, or to forget it, and waits for the answers."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from core.cache_epoch import epoch_after, is_epoch, newest_epoch
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

log = logging.getLogger(__name__)

ANSWER_TIMEOUT_S = 2.0
BEHIND_S = 5.0
"""A worker whose reports name an older epoch for longer is told again: it has missed a reset."""
UNASKED = 0
"""Number of what is told again; nobody waits for the answer."""


@dataclass(frozen=True, slots=True)
class WorkerCache:
    """What is known of one worker's cache."""

    worker_id: WorkerId
    role: Role
    incarnation: Incarnation
    state: CacheState | None
    """None: the worker did not answer in time, so nothing is known."""
    silent_s: float
    """For so long it had not reported when it was asked."""


class CacheControl:
    """Owned by one event loop.

    A worker that fell silent is asked all the same, and told as unreachable, until another life
    of it reports: it may come back with its cache as it was. Then it is told of the newest reset
    that any worker or this router knows of, as is one that another router did not reach. One that
    has drained is forgotten: its cache ends with it, and serves no new request before that.

    Args:
        send: Queues a message to one worker's connection; lost where that is gone.
        incarnation: The router's; what its resets begin is named after it.
    """

    def __init__(
        self,
        send: Callable[[ClientId, AnyMessage], None],
        *,
        incarnation: Incarnation,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._incarnation = incarnation
        self._epoch = ""
        self._send = send
        self._clock = clock
        self._behind_since: dict[WorkerId, float] = {}
        self._questions: Questions[CacheReport] = Questions(send, clock)

    def heard(self, client: ClientId, heartbeat: Heartbeat) -> None:
        """A worker reported over ``client``."""
        self._questions.heard(client, heartbeat)
        self._epoch = newest_epoch((self._epoch, heartbeat.cache_epoch))
        # Without tiers a worker names none, and shares nothing that could be old.
        if not is_epoch(heartbeat.cache_epoch) or heartbeat.cache_epoch == self._epoch:
            self._behind_since.pop(heartbeat.worker_id, None)
        else:
            self._tell_again(client, heartbeat.worker_id)

    def _tell_again(self, client: ClientId, worker_id: WorkerId) -> None:
        """Tell a worker that stays behind of the newest epoch, each ``BEHIND_S``."""
        now = self._clock()
        since = self._behind_since.setdefault(worker_id, now)
        if now - since >= BEHIND_S:
            self._behind_since[worker_id] = now
            log.warning("event=reset_told_again worker=%s epoch=%s", worker_id, self._epoch)
            self._send(client, ResetCache(UNASKED, self._epoch))

    def forget(self, worker_id: WorkerId, incarnation: Incarnation) -> None:
        """This life of the worker has drained and is gone; if it is not, it reports again."""
        self._questions.forget(worker_id, incarnation)
        self._behind_since.pop(worker_id, None)

    def take(self, report: CacheReport) -> bool:
        """Take an answer; False: nobody waits for it any more."""
        return report.number == UNASKED or self._questions.take(report)

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
                silent_s=reply.asked_at - reply.life.heard_at,
            )
            for reply in replies
        ]
