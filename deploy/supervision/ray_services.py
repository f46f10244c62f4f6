"""The services of a deployment as named Ray actors: starting, seeing and ending them."""

import logging
import time
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import ray
from ray.actor import ActorHandle
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayError

from core.lifecycle import WorkerHealth
from core.messages import DesiredWorkers, Party
from core.version import VERSION
from deploy.cluster.ray_errors import why_died
from deploy.supervision.actors import Ending, RemoteServiceActor
from deploy.supervision.desired import Observed, State
from deploy.supervision.events import (
    Event,
    ProcessDied,
    ProcessIdentity,
    ProcessStarted,
    ServiceEnded,
)
from deploy.supervision.launch import Launch
from deploy.supervision.seat_state import UP, SeatAction, SeatEvent, SeatState, after
from deploy.supervision.service_names import role_of

log = logging.getLogger(__name__)
T = TypeVar("T")

POLL_S = 1.0
"""Between two questions after a service's health."""
END_WAIT_S = 5.0
"""Each question after a service's end is answered within this time: one that nobody waits for any
more must not occupy a thread of the service for ever."""
SEEN_AS: Mapping[SeatState, State] = {
    SeatState.NAMELESS: "pending",
    SeatState.PLACED: "pending",
    SeatState.ADOPTED: "adopted",
    SeatState.STARTING: "starting",
    SeatState.READY: "ready",
    SeatState.DRAINING: "draining",
    SeatState.ENDED: "ended",
    SeatState.REFUSED: "refused",
    SeatState.DEAD: "dead",
}
HEARD = {
    "starting": SeatEvent.HEARD_STARTING,
    "ready": SeatEvent.HEARD_READY,
    "draining": SeatEvent.HEARD_DRAINING,
}


@dataclass(slots=True)
class _Seat:
    """One service and what is known of it."""

    role: Party
    revision: str
    launch: Launch | None = None
    """None: an earlier controller has started it."""
    state: SeatState = SeatState.VACANT
    actor: Any = None
    """Its handle in every state but ``NAMELESS``; None also where it was missed."""
    health: WorkerHealth | None = None
    answered_at: float = 0.0
    """Later by all the time since then in which nobody listened."""
    asked_at: float = 0.0
    is_introduced: bool = False
    """Its process has said who it is."""
    last_words: str | None = None
    """Why its process ends, where that could tell."""
    health_call: ray.ObjectRef[Any] | None = None
    end_call: ray.ObjectRef[Any] | None = None
    identity_call: ray.ObjectRef[Any] | None = None

    def clear(self, now: float) -> None:
        """Drop what is known of the last process."""
        self.actor = self.health = self.last_words = None
        self.answered_at, self.asked_at, self.is_introduced = now, 0.0, False
        self.health_call = self.end_call = self.identity_call = None


class RayServices:
    """All services of one namespace. One thread calls it."""

    def __init__(
        self,
        namespace: str,
        sentinel: ActorHandle[Any] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._namespace = namespace
        self._clock = clock
        self._listened_until = clock()
        self._sentinel = sentinel
        self._seats: dict[str, _Seat] = {}
        self._events: list[Event] = []
        self._num_calls = 0

    @property
    def num_calls(self) -> int:
        """How many calls into Ray have come back, whatever came of them. Any thread may look."""
        return self._num_calls

    @contextmanager
    def _calling(self) -> Generator[None]:
        """Around all that may wait for Ray: at worst a start, which finds a name and takes it."""
        try:
            yield
        finally:
            self._num_calls += 1

    @property
    def revisions(self) -> dict[str, str]:
        """By name, of all services there are."""
        return {name: seat.revision for name, seat in self._seats.items()}

    def take_events(self) -> list[Event]:
        """Return what has happened since the last call."""
        events, self._events = self._events, []
        return events

    def adopt(self, revisions: Mapping[str, str]) -> None:
        """Take over what an earlier controller has started; what is not there any more is dead."""
        for name, revision in revisions.items():
            seat = _Seat(role_of(name), revision, answered_at=self._clock())
            self._seats[name] = seat
            try:
                with self._calling():
                    seat.actor = ray.get_actor(name, namespace=self._namespace)
            except ValueError:
                self._meet(name, seat, SeatEvent.MISSED)
            else:
                self._meet(name, seat, SeatEvent.FOUND)

    def start(self, name: str, role: Party, revision: str, launch: Launch) -> None:
        """Start a service, or start it anew. Returns before it has a process.

        Raises:
            InvalidTransitionError: its process is still there, or about to be.
        """
        seat = self._seats.setdefault(name, _Seat(role, revision))
        seat.role, seat.revision, seat.launch = role, revision, launch
        self._meet(name, seat, SeatEvent.START_ASKED)

    @property
    def nameless(self) -> list[str]:
        """Those that are to start, and whose predecessors still had their names at the last try."""
        return [name for name, seat in self._seats.items() if seat.state is SeatState.NAMELESS]

    def claim_name(self, name: str) -> None:
        """Start one of the ``nameless`` if its name is free by now."""
        self._try_create(name, self._seats[name])

    def drain(self, name: str) -> None:
        """Have it finish what it has.

        Raises:
            InvalidTransitionError: it does not serve.
        """
        self._meet(name, self._seats[name], SeatEvent.DRAIN_ASKED)

    def kill(self, name: str) -> None:
        """End its process now, though it be frozen."""
        self._meet(name, self._seats[name], SeatEvent.KILL_ASKED)

    def forget(self, name: str) -> None:
        """Free its name.

        Raises:
            InvalidTransitionError: it is not over.
        """
        self._meet(name, self._seats[name], SeatEvent.FORGET_ASKED)
        del self._seats[name]

    def _meet(self, name: str, seat: _Seat, event: SeatEvent, told: Event | None = None) -> None:
        """Bring ``seat`` on; ``told`` goes to those who listen if it is news."""
        seat.state, actions = after(seat.state, event)
        for action in actions:
            match action:
                case SeatAction.KILL:
                    with self._calling():
                        ray.kill(seat.actor, no_restart=True)
                case SeatAction.CREATE:
                    seat.clear(self._clock())
                    self._try_create(name, seat)
                case SeatAction.DRAIN:
                    with self._calling():
                        seat.actor.drain.remote()
                case SeatAction.TELL_STARTED | SeatAction.TELL_ENDED | SeatAction.TELL_DIED:
                    assert told is not None, "who answers says what"
                    self._events.append(told)

    def _try_create(self, name: str, seat: _Seat) -> None:
        launch = seat.launch
        assert launch is not None, "start gave it one"
        try:
            with self._calling():
                seat.actor = RemoteServiceActor.options(
                    name=name,
                    namespace=self._namespace,
                    lifetime="detached",
                    num_cpus=launch.bundle.num_cpus,
                    num_gpus=launch.bundle.num_gpus,
                    resources=launch.bundle.custom,
                    max_restarts=0,
                    scheduling_strategy=launch.strategy,
                    runtime_env={"env_vars": dict(launch.environment)},
                ).remote(launch.service, self._sentinel, VERSION)
        except ValueError:
            log.debug("service=%s waits for its name", name)
        else:
            self._meet(name, seat, SeatEvent.CREATED)

    def observe(self, wait_s: float, desired: DesiredWorkers) -> dict[str, Observed]:
        """Return what is seen of all services, after ``wait_s`` or as soon as one has news.

        Each is told what is ``desired``, and in what trouble others are: workers tell routers.
        """
        begun = self._clock()
        self._excuse(begun - self._listened_until)
        for seat in self._seats.values():
            if seat.state in UP:
                with self._calling():
                    self._ask(seat, desired)
        if calls := list(self._calls()):
            with self._calling():
                ray.wait(calls, num_returns=1, timeout=wait_s, fetch_local=False)
                ready, _ = ray.wait(calls, num_returns=len(calls), timeout=0, fetch_local=False)
            done = set(ready)
            self._excuse(self._clock() - begun - wait_s)
            for name, seat in self._seats.items():
                self._hear(name, seat, done)
        else:
            with self._calling():
                time.sleep(wait_s)  # nobody is there who could have news
        self._listened_until = self._clock()
        return {name: self._observed(name, seat) for name, seat in self._seats.items()}

    def _excuse(self, unheard_s: float) -> None:
        """Count no silence while this process itself stood still, or waited for Ray elsewhere.

        Or a controller that comes to again would end every service that it has not asked yet.
        """
        for seat in self._seats.values():
            seat.answered_at += max(unheard_s, 0.0)

    def _ask(self, seat: _Seat, desired: DesiredWorkers) -> None:
        now = self._clock()
        if seat.end_call is None:
            seat.end_call = seat.actor.wait_end.remote(END_WAIT_S)
        if seat.identity_call is None and not seat.is_introduced:
            seat.identity_call = seat.actor.identity.remote()
        if seat.health_call is None and now - seat.asked_at >= POLL_S:
            seat.asked_at = now
            seat.health_call = seat.actor.health.remote(desired)

    def _calls(self) -> Iterable[ray.ObjectRef[Any]]:
        for seat in self._seats.values():
            for call in (seat.health_call, seat.end_call, seat.identity_call):
                if call is not None:
                    yield call

    def _hear(self, name: str, seat: _Seat, done: set[ray.ObjectRef[Any]]) -> None:
        try:
            if seat.identity_call in done:
                call, seat.identity_call = seat.identity_call, None
                self._hear_identity(name, seat, self._answer(call))
            if seat.health_call in done:
                call, seat.health_call = seat.health_call, None
                self._hear_health(name, seat, self._answer(call))
            if seat.end_call in done:
                call, seat.end_call = seat.end_call, None
                self._hear_end(name, seat, self._answer(call))
        except (ActorUnavailableError, GetTimeoutError) as error:
            log.debug("service=%s does not answer: %s", name, error)
        except RayError as error:
            seat.health_call = seat.end_call = seat.identity_call = None
            died = ProcessDied(name, seat.last_words or why_died(error))
            self._meet(name, seat, SeatEvent.DIED, died)

    def _answer(self, call: ray.ObjectRef[T]) -> T:
        with self._calling():
            return ray.get(call, timeout=POLL_S)

    def _hear_identity(self, name: str, seat: _Seat, identity: ProcessIdentity) -> None:
        seat.is_introduced, seat.answered_at = True, self._clock()
        self._meet(name, seat, SeatEvent.INTRODUCED, ProcessStarted(name, identity))

    def _hear_health(self, name: str, seat: _Seat, health: WorkerHealth) -> None:
        seat.health, seat.answered_at = health, self._clock()
        self._meet(name, seat, HEARD[health.state])

    def _hear_end(self, name: str, seat: _Seat, ending: Ending | None) -> None:
        if ending is None:
            return
        if ending.is_crash:
            seat.last_words = ending.error
            self._meet(name, seat, SeatEvent.KILL_ASKED)
            return
        event = SeatEvent.ENDED if ending.error is None else SeatEvent.REFUSED
        self._meet(name, seat, event, ServiceEnded(name, ending.error))

    def _observed(self, name: str, seat: _Seat) -> Observed:
        silence_s = 0.0
        if seat.health is not None or seat.state is SeatState.ADOPTED:
            silence_s = max(self._clock() - seat.answered_at, 0.0)
        if seat.health is not None:
            silence_s = max(silence_s, seat.health.silence_s)
        return Observed(name, seat.role, seat.revision, SEEN_AS[seat.state], silence_s)
