"""Puts together what the processes of a deployment have recorded of one request.

Each worker's entries are by a clock of its own. Its answer carries that clock's time, which the
router takes to be the middle of the round trip: that is right to within half of it. The shortest
of some round trips counts.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final, Literal

import msgspec

from core.channel import ClientId
from core.ids import Incarnation, RequestId, WorkerId
from core.messages import AnyMessage, Heartbeat, Role, ShowTrace, TraceReport
from core.trace import Recorder, TraceEvent
from router.questions import Questions, Reply

ANSWER_TIMEOUT_S = 2.0
NUM_ROUND_TRIPS: Final = 4


@dataclass(frozen=True, slots=True)
class ProcessTrace:
    """What one process recorded of a request."""

    name: str
    role: Role | Literal["router"]
    incarnation: Incarnation
    events: tuple[TraceEvent, ...]
    """By the router's clock."""
    uncertainty_s: float = 0.0
    """The entries' true times are at most so much earlier or later, all of them alike."""
    is_reached: bool = True
    """False: it did not answer in time."""


class RequestNames:
    """The requests behind the ids that clients know: the newest ones, with bounded memory."""

    def __init__(self, max_names: int) -> None:
        self._max_names = max_names
        self._requests_of_name: dict[str, tuple[RequestId, ...]] = {}

    def add(self, names: Iterable[str], requests: tuple[RequestId, ...]) -> None:
        """Each of ``names`` means ``requests`` from now on, whatever it meant before.

        So does each of several ``requests``, which tells its sisters.
        """
        sisters = requests if len(requests) > 1 else ()
        for name in (*names, *sisters):
            self._add(name, requests)

    def _add(self, name: str, requests: tuple[RequestId, ...]) -> None:
        self._requests_of_name.pop(name, None)
        self._requests_of_name[name] = requests
        if len(self._requests_of_name) > self._max_names:
            del self._requests_of_name[next(iter(self._requests_of_name))]

    def requests(self, name: str) -> tuple[RequestId, ...]:
        """Return the requests that ``name`` means; a name that is not known means itself."""
        return self._requests_of_name.get(name) or (RequestId(name),)


class TraceControl:
    """Owned by one event loop.

    Args:
        send: Queues a message to one worker's connection; lost where that is gone.
        recorder: The router's own.
        incarnation: The router's.
    """

    def __init__(
        self,
        send: Callable[[ClientId, AnyMessage], None],
        recorder: Recorder,
        *,
        incarnation: Incarnation,
    ) -> None:
        self.recorder = recorder
        # An answer has two names: the one that it is given, and the one that the client gave it.
        # One of several sequences has those of the sequences, too: again at most two for each.
        self.names = RequestNames(2 * recorder.max_requests)
        self._incarnation = incarnation
        self._questions: Questions[TraceReport] = Questions(send, recorder.now)

    def heard(self, client: ClientId, heartbeat: Heartbeat) -> None:
        """A worker reported over ``client``."""
        self._questions.heard(client, heartbeat)

    def take(self, report: TraceReport) -> bool:
        """Take an answer; False: nobody waits for it any more."""
        return self._questions.take(report)

    async def collect(self, request_id: RequestId) -> list[ProcessTrace]:
        """Return what the router and every worker that it chose have recorded; [] if unknown.

        Bounded by ``ANSWER_TIMEOUT_S``, and a bit for each further round trip.
        """
        events = self.recorder.events(request_id)
        if not events:
            return []
        own = ProcessTrace("router", "router", self._incarnation, events)
        return [own, *await self._ask(request_id, _workers_of(events))]

    async def _ask(self, request_id: RequestId, workers: set[WorkerId]) -> list[ProcessTrace]:
        """Ask until each worker's clock is known well enough."""
        lives = [life for life in self._questions.lives() if life.heartbeat.worker_id in workers]
        best: dict[Incarnation, Reply[TraceReport]] = {}
        for _ in range(NUM_ROUND_TRIPS):
            replies = await self._questions.ask(
                lives, lambda number: ShowTrace(number, request_id), timeout_s=ANSWER_TIMEOUT_S
            )
            for reply in replies:
                incarnation = reply.life.heartbeat.incarnation
                best[incarnation] = _better(best.get(incarnation), reply)
            lives = [reply.life for reply in replies if reply.answer is not None]
            if not lives:
                break
        return [aligned(reply) for reply in best.values()]


def aligned(reply: Reply[TraceReport]) -> ProcessTrace:
    """Return a worker's entries by the clock of whoever asked it."""
    heartbeat = reply.life.heartbeat
    identity = (heartbeat.worker_id, heartbeat.role, heartbeat.incarnation)
    report = reply.answer
    if report is None:
        return ProcessTrace(*identity, events=(), is_reached=False)
    offset_s = (reply.asked_at + reply.answered_at) / 2 - report.now_s
    return ProcessTrace(
        *identity,
        events=tuple(
            msgspec.structs.replace(event, at_s=event.at_s + offset_s) for event in report.events
        ),
        uncertainty_s=_round_trip_s(reply) / 2,
    )


def _round_trip_s(reply: Reply[TraceReport]) -> float:
    return reply.answered_at - reply.asked_at


def _better(old: Reply[TraceReport] | None, new: Reply[TraceReport]) -> Reply[TraceReport]:
    """Return the one that tells more: an answer, and the one that came faster."""
    if old is None or old.answer is None:
        return new
    return new if new.answer is not None and _round_trip_s(new) < _round_trip_s(old) else old


def _workers_of(events: Iterable[TraceEvent]) -> set[WorkerId]:
    """Return the workers that the router chose for any attempt."""
    chosen = [event.values for event in events if event.event == "dispatched"]
    return {
        WorkerId(str(values[role]))
        for values in chosen
        for role in ("decode", "prefill")
        if role in values
    }
