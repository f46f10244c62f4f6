"""Asks workers over the connections on which they report, and waits for their answers."""

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import count
from typing import Generic, Protocol, TypeVar

from core.channel import ClientId
from core.ids import Incarnation, WorkerId
from core.messages import AnyMessage, Heartbeat


class Answer(Protocol):
    """What every answer tells beside its content."""

    @property
    def number(self) -> int:
        """Of the question."""
        ...

    @property
    def incarnation(self) -> Incarnation:
        """Of the worker that answers."""
        ...


A = TypeVar("A", bound=Answer)


@dataclass(frozen=True, slots=True)
class Life:
    """The newest process of a worker, and the connection over which it reports."""

    client: ClientId
    heartbeat: Heartbeat
    heard_at: float
    """When it last reported, by the asker's clock."""


@dataclass(frozen=True, slots=True)
class Reply(Generic[A]):
    """What one worker said to a question. Times are of the asker's clock."""

    life: Life
    answer: A | None
    """None: it did not answer in time."""
    asked_at: float
    answered_at: float


@dataclass(eq=False)
class _Question(Generic[A]):
    missing: set[Incarnation]
    answers: dict[Incarnation, tuple[A, float]] = field(
        default_factory=dict[Incarnation, tuple[A, float]]
    )
    is_answered: asyncio.Event = field(default_factory=asyncio.Event)


class Questions(Generic[A]):
    """Owned by one event loop.

    A worker that fell silent is asked all the same, until another life of it reports or whoever
    asks has it forgotten: it may come back as it was.
    """

    def __init__(
        self, send: Callable[[ClientId, AnyMessage], None], clock: Callable[[], float]
    ) -> None:
        """Ask by ``send``, which loses a message where the connection is gone."""
        self._send = send
        self._clock = clock
        self._lives: dict[WorkerId, Life] = {}
        self._numbers = count(1)
        self._open: dict[int, _Question[A]] = {}

    def heard(self, client: ClientId, heartbeat: Heartbeat) -> None:
        """A worker reported over ``client``."""
        self._lives[heartbeat.worker_id] = Life(client, heartbeat, self._clock())

    def forget(self, worker_id: WorkerId, incarnation: Incarnation) -> None:
        """Ask this life of the worker no more, unless it reports again."""
        life = self._lives.get(worker_id)
        if life is not None and life.heartbeat.incarnation == incarnation:
            del self._lives[worker_id]

    def lives(self) -> list[Life]:
        """Return the newest life of every worker that has reported, by name."""
        return sorted(self._lives.values(), key=lambda life: life.heartbeat.worker_id)

    def take(self, answer: A) -> bool:
        """Take an answer; False: nobody waits for it any more."""
        question = self._open.get(answer.number)
        if question is None or answer.incarnation not in question.missing:
            return False
        question.missing.discard(answer.incarnation)
        question.answers[answer.incarnation] = (answer, self._clock())
        if not question.missing:
            question.is_answered.set()
        return True

    async def ask(
        self, lives: Iterable[Life], question_of: Callable[[int], AnyMessage], *, timeout_s: float
    ) -> list[Reply[A]]:
        """Ask each of ``lives`` and return its reply after ``timeout_s`` at most.

        Args:
            lives: Whom to ask.
            question_of: Makes the message that carries the number it is given.
            timeout_s: For all of them together.
        """
        lives = list(lives)
        number = next(self._numbers)
        question = _Question[A]({life.heartbeat.incarnation for life in lives})
        self._open[number] = question
        asked_at = self._clock()
        try:
            for life in lives:
                self._send(life.client, question_of(number))
            if lives:
                async with asyncio.timeout(timeout_s):
                    await question.is_answered.wait()
        except TimeoutError:
            pass  # whoever is still missing has no answer
        finally:
            del self._open[number]
        return [self._reply(life, question, asked_at) for life in lives]

    def _reply(self, life: Life, question: _Question[A], asked_at: float) -> Reply[A]:
        found = question.answers.get(life.heartbeat.incarnation)
        if found is None:
            return Reply(life, None, asked_at, self._clock())
        answer, answered_at = found
        return Reply(life, answer, asked_at, answered_at)
