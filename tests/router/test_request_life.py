"""Whatever comes, in any order: one answer, nothing left on a worker, a bounded number of tries.

Failures elsewhere in the field: a retry that is decided by flags, so that a client that leaves
while its request is being retried leaves the second attempt running; a worker that always refuses
and is always asked again.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.errors import InternalError, OverloadedError, RequestError
from core.ids import Attempt, Incarnation, WorkerId
from core.messages import Heartbeat, WorkerLoad
from router import request_phase
from router.failures import GenerationTimeoutError, WorkersLostError
from router.policy import FailureKind, Route
from router.registry import Worker
from router.request_life import Actions, AttemptFailure, RequestLife
from router.request_phase import Action, Event, Phase

MAX_ATTEMPTS = 3
KINDS: tuple[FailureKind, ...] = get_args(FailureKind)
Name = tuple[WorkerId, Incarnation]


def route_to(index: int, life: int = 0) -> Route:
    worker_id, incarnation = WorkerId(f"decode-{index}"), Incarnation(f"{index:08x}{life:08x}")
    heartbeat = Heartbeat(
        worker_id=worker_id,
        role="decode",
        incarnation=incarnation,
        address="tcp://127.0.0.1:1",
        model="model",
        max_model_len=512,
        load=WorkerLoad(),
        state="ready",
    )
    return Route(Worker(heartbeat, 0.0, proven=True), None, "short")


@dataclass
class World:
    """The workers and the client, who remember what they were told."""

    life: RequestLife = field(default_factory=lambda: RequestLife(max_attempts=MAX_ATTEMPTS))
    lives: dict[int, int] = field(default_factory=dict)
    held: set[tuple[Name, Attempt]] = field(default_factory=set)
    """What workers have, or may have."""
    dispatched: list[tuple[Name, Attempt]] = field(default_factory=list)
    refused: set[Name] = field(default_factory=set)
    num_answers: int = 0
    has_left: bool = False

    def do(self, actions: Actions) -> None:
        for action in actions:
            name, attempt = self.dispatched[-1] if self.dispatched else (None, None)
            match action:
                case Action.DISPATCH:
                    self._dispatch()
                case Action.ABORT:
                    assert name is not None
                    assert attempt is not None
                    self.held.remove((name, attempt))
                case Action.ANSWER:
                    self.num_answers += 1
        self.check()

    def _dispatch(self) -> None:
        route = self.life.route
        assert route is not None
        assert not self.held, "two workers have it"
        name = (route.decode.worker_id, route.decode.incarnation)
        self.dispatched.append((name, self.life.attempt))
        self.held.add((name, self.life.attempt))

    def check(self) -> None:
        self.life.check_invariants()
        assert self.num_answers == (self.life.phase in {Phase.FINISHED, Phase.FAILED})
        if self.life.is_over:
            assert not self.held, "a worker goes on with what is over"
        assert len(self.dispatched) <= MAX_ATTEMPTS + len(self.refused)

    def place(self, index: int) -> None:
        self.do(self.life.placed(route_to(index, self.lives.get(index, 0))))

    def says(self, index: int, what: Callable[[], Actions], *, is_last: bool = False) -> None:
        """The worker of dispatch ``index`` says something of it, however late."""
        if not self.dispatched:
            return
        name, attempt = self.dispatched[index % len(self.dispatched)]
        if not self.life.is_current(attempt, *name):
            return
        if is_last:
            self.held.discard((name, attempt))
        self.do(what())

    def fail(self, index: int, kind: FailureKind) -> None:
        if kind == "draining" and self.dispatched:
            self.refused.add(self.dispatched[index % len(self.dispatched)][0])
        failure = AttemptFailure(kind, "scripted")
        self.says(index, lambda: self.life.attempt_failed(failure), is_last=True)

    def lose_worker(self, index: int) -> None:
        """A worker dies, with all that it has."""
        old = route_to(index, self.lives.get(index, 0)).decode
        self.lives[index] = self.lives.get(index, 0) + 1
        name = (old.worker_id, old.incarnation)
        self.held = {each for each in self.held if each[0] != name}
        if self.life.is_on(*name):
            self.do(self.life.attempt_failed(AttemptFailure("worker_lost", "died")))

    def leave(self) -> None:
        self.has_left = True
        self.do(self.life.left())


EVENTS = st.one_of(
    st.builds(lambda i: lambda w: w.place(i), st.integers(0, 2)),
    st.builds(lambda i: lambda w: w.says(i, w.life.gave_token), st.integers(0, 9)),
    st.builds(lambda i, k: lambda w: w.fail(i, k), st.integers(0, 9), st.sampled_from(KINDS)),
    st.builds(lambda i: lambda w: w.lose_worker(i), st.integers(0, 2)),
    st.just(lambda w: w.do(w.life.retry_due())),
)
ENDINGS = st.one_of(
    st.just(World.leave),
    st.just(lambda w: w.do(w.life.timed_out(1.0))),
    st.just(lambda w: w.do(w.life.broke(RuntimeError("a bug")))),
    st.just(lambda w: w.do(w.life.not_placed(OverloadedError("no worker")))),
    st.builds(lambda i: lambda w: w.says(i, lambda: w.life.unreadable("?")), st.integers(0, 9)),
    st.builds(
        lambda i, known: (
            lambda w: w.says(i, lambda: w.life.finished(by_worker=known), is_last=known)
        ),
        st.integers(0, 9),
        st.booleans(),
    ),
)


def play(events: list[Callable[[World], None]]) -> World:
    world = World()
    for event in events:
        event(world)
    world.leave()  # at the latest, the client's patience ends
    assert world.life.is_over
    return world


@settings(max_examples=400, deadline=None)
@given(st.lists(EVENTS, max_size=30), st.lists(ENDINGS, max_size=3), st.lists(EVENTS, max_size=10))
def test_every_order_of_events_has_one_answer_and_leaves_nothing_on_a_worker(
    events: list[Callable[[World], None]],
    endings: list[Callable[[World], None]],
    late: list[Callable[[World], None]],
) -> None:
    play([*events, *endings, *late])


FATES: list[list[Callable[[World], None]]] = [
    [lambda w: w.place(0), World.leave],
    [lambda w: w.place(0), lambda w: w.do(w.life.timed_out(1.0))],
    [lambda w: w.place(0), lambda w: w.says(0, lambda: w.life.finished(by_worker=False))],
    [lambda w: w.place(0), lambda w: w.says(0, lambda: w.life.unreadable("?"))],
]


@pytest.mark.parametrize("fate", FATES)
def test_without_its_abort_each_of_these_ends_leaves_work_on_a_worker(
    fate: list[Callable[[World], None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    play(fate)
    without = {
        pair: (after, tuple(a for a in actions if a is not Action.ABORT))
        for pair, (after, actions) in request_phase.TRANSITIONS.items()
    }
    monkeypatch.setattr(request_phase, "TRANSITIONS", without)
    with pytest.raises(AssertionError, match="goes on with what is over"):
        play(fate)


def test_an_answer_that_is_given_twice_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    twice = {(Phase.FINISHED, Event.LEFT): (Phase.FINISHED, (Action.ANSWER,))}
    monkeypatch.setattr(request_phase, "TRANSITIONS", request_phase.TRANSITIONS | twice)
    with pytest.raises(AssertionError):
        play(
            [
                lambda w: w.place(0),
                lambda w: w.says(0, lambda: w.life.finished(by_worker=True), is_last=True),
            ]
        )


def test_a_worker_that_drains_costs_no_attempt_once_and_one_from_then_on() -> None:
    world = World()
    for _ in range(MAX_ATTEMPTS + 1):
        world.place(0)
        world.fail(-1, "draining")
        world.do(world.life.retry_due())
    assert world.life.phase is Phase.FAILED
    assert isinstance(world.life.error, OverloadedError)
    assert len(world.dispatched) == MAX_ATTEMPTS + 1


def test_any_number_of_draining_workers_is_passed_by() -> None:
    world = World()
    for index in range(3 * MAX_ATTEMPTS):
        world.place(index)
        world.fail(-1, "draining")
        assert world.life.retry_delay_s == 0.0
        world.do(world.life.retry_due())
    assert world.life.phase is Phase.QUEUED
    assert world.life.num_counted == 0


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        ("request", RequestError),
        ("internal", InternalError),
        ("capacity", OverloadedError),
        ("transfer", WorkersLostError),
        ("worker_lost", WorkersLostError),
    ],
)
def test_the_last_failure_decides_what_the_client_is_told(
    kind: FailureKind, error: type[Exception]
) -> None:
    world = World()
    for _ in range(MAX_ATTEMPTS):
        world.place(0)
        world.fail(-1, kind)
        world.do(world.life.retry_due())
    assert type(world.life.error) is error
    is_retried = kind not in {"request", "internal"}
    assert len(world.dispatched) == (MAX_ATTEMPTS if is_retried else 1)


def test_h01_a_late_word_of_an_earlier_attempt_or_of_another_worker_is_no_news() -> None:
    world = World()
    world.place(0)
    first = world.dispatched[0]
    world.fail(0, "transfer")
    world.do(world.life.retry_due())
    world.place(1)
    (second_name, second_attempt) = world.dispatched[1]
    assert world.life.is_current(second_attempt, *second_name)
    assert not world.life.is_current(first[1], *first[0])
    assert not world.life.is_current(second_attempt, *first[0])
    assert not world.life.is_current(first[1], *second_name)


def test_the_peer_that_failed_is_avoided_and_without_one_the_decode_worker() -> None:
    life = RequestLife(max_attempts=3)
    life.placed(route_to(0))
    life.attempt_failed(AttemptFailure("transfer", "lost", WorkerId("prefill-0")))
    assert life.avoid == {"prefill-0"}
    life.retry_due()
    life.placed(route_to(1))
    life.attempt_failed(AttemptFailure("worker_lost", "lost"))
    assert life.avoid == {"prefill-0", "decode-1"}


def test_a_timeout_after_the_end_changes_no_answer() -> None:
    life = RequestLife(max_attempts=1)
    life.placed(route_to(0))
    life.finished(by_worker=True)
    assert life.timed_out(1.0) == ()
    assert life.error is None
    late = RequestLife(max_attempts=1)
    assert late.timed_out(1.0) == (Action.ANSWER,)
    assert isinstance(late.error, GenerationTimeoutError)
