"""A step is complete when every rank has completed it: until then some rank may still write KV.

The followers here are sockets that the test answers for, the leader's own runner is scripted.
"""

import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import pytest

from core.errors import InternalError
from core.ids import StepSeq
from engine.batch import StepBatch, StepOutput
from ranks.frames import receive_frame, send_frame
from ranks.messages import StepDone
from ranks.ranked_runner import RankedRunner
from tests.ranks.scripted_runner import OUTPUT, ScriptedRunner

BATCH = StepBatch(step=StepSeq(7), openings=(), sequences=(), layer_marks=(1, 3))


@dataclass(frozen=True)
class ScriptedFollower:
    rank: int
    steps: socket.socket


class ScriptedFollowers:
    def __init__(self, count: int) -> None:
        pairs = [socket.socketpair() for _ in range(count)]
        self.theirs = [theirs for _, theirs in pairs]
        self._followers = [ScriptedFollower(at + 1, ours) for at, (ours, _) in enumerate(pairs)]
        for sock in (*self.theirs, *(follower.steps for follower in self._followers)):
            sock.settimeout(30)
        self.is_killed = False

    def __iter__(self) -> Iterator[ScriptedFollower]:
        return iter(self._followers)

    def kill(self) -> None:
        self.is_killed = True


@pytest.fixture
def followers() -> Iterator[ScriptedFollowers]:
    made = ScriptedFollowers(2)
    yield made
    for sock in (*made.theirs, *(follower.steps for follower in made)):
        sock.close()


def launch(followers: ScriptedFollowers, seen: list[int] | None = None) -> Callable[[], StepOutput]:
    marks: list[int] = [] if seen is None else seen
    return RankedRunner(ScriptedRunner(), followers).launch(BATCH, marks.append).wait


def test_all_ranks_are_given_the_step_and_the_leader_reports_layers_for_all(
    followers: ScriptedFollowers,
) -> None:
    seen: list[int] = []
    launch(followers, seen)
    assert [receive_frame(sock) for sock in followers.theirs] == [
        replace(BATCH, layer_marks=())
    ] * 2
    assert seen == [1, 3]


@pytest.mark.parametrize("last", [0, 1])
def test_a_step_is_complete_when_the_last_rank_says_so(
    followers: ScriptedFollowers, last: int
) -> None:
    wait = launch(followers)
    outputs: list[StepOutput] = []
    waiter = threading.Thread(target=lambda: outputs.append(wait()))
    waiter.start()
    send_frame(followers.theirs[1 - last], StepDone(StepSeq(7)))
    waiter.join(0.2)
    assert waiter.is_alive()
    send_frame(followers.theirs[last], StepDone(StepSeq(7)))
    waiter.join(30)
    assert outputs == [OUTPUT]


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (StepDone(StepSeq(7), "no memory"), "rank 2: no memory"),
        (StepDone(StepSeq(6)), "rank 2 ended step 6 while 7 was awaited"),
        ("nonsense", "rank 2 sent 'nonsense' for a step"),
    ],
)
def test_one_rank_that_fails_fails_the_step(
    followers: ScriptedFollowers, answer: object, reason: str
) -> None:
    wait = launch(followers)
    send_frame(followers.theirs[0], StepDone(StepSeq(7)))
    send_frame(followers.theirs[1], answer)
    with pytest.raises(InternalError, match=reason):
        wait()


def test_a_rank_that_is_gone_fails_the_step_wherever_that_is_noticed(
    followers: ScriptedFollowers,
) -> None:
    wait = launch(followers)
    followers.theirs[0].close()
    with pytest.raises(InternalError, match="rank 1 did not end its part"):
        wait()
    with pytest.raises(InternalError, match="rank 1 takes no step any more"):
        launch(followers)


def test_a_rank_that_is_frozen_fails_the_step_within_the_bound(
    followers: ScriptedFollowers,
) -> None:
    for follower in followers:
        follower.steps.settimeout(0.05)
    with pytest.raises(InternalError, match="rank 1 did not end its part"):
        launch(followers)()


def test_a_drain_ends_the_followers_and_then_the_leaders_work(
    followers: ScriptedFollowers,
) -> None:
    own = ScriptedRunner()
    RankedRunner(own, followers).drain()
    assert followers.is_killed
    assert own.is_drained
