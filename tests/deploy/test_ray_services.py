"""The services as real Ray actors: a name that is free again, and a new controller among them.

The failures guarded against: a worker that its config had refused, whose process keeps its name
for ever, so that its successor waits for ever; a crash of which nobody learns what it was; a new
controller that takes a service for starting, since it has not answered yet; answers that wait for
each other; a controller that ends all services since it stood still itself; and one without
services that takes a core by looking.
"""

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import GetTimeoutError

from core.messages import DesiredWorkers
from deploy.supervision import ray_services
from deploy.supervision.actors import ServiceActor
from deploy.supervision.controller import Controller
from deploy.supervision.ray_services import RayServices
from tests.deploy.ray_cluster import HEAD, said_on_a_cluster
from tests.deploy.small_deployment import IdlePlan

PROGRAM = f"""
import json, sys, time
from tests.deploy.small_deployment import IdlePlan
import ray
from core.messages import DesiredWorkers
from deploy.supervision.ray_services import RayServices

ray.init(sys.argv[1], logging_level="ERROR", log_to_driver=False, _node_ip_address={HEAD!r})
wanted = DesiredWorkers(0, 0, 1)
services = RayServices("seats")
said = {{}}

def state_of(services, name):
    # Without a look at it: what has been asked of it may have been done by the first one.
    return services._observed(name, services._seats[name]).state

def wait_for(services, state):
    seen = [state_of(services, "decode-0")]
    while seen[-1] != state:
        for name in services.nameless:
            services.claim_name(name)
        now = services.observe(0.5, wanted)["decode-0"].state
        if seen[-1:] != [now]:
            seen.append(now)
    return seen

def start(behaviour):
    plan = IdlePlan(("obey", behaviour))
    services.start("decode-0", "decode", "a", plan.launch("decode", "decode-0"))

start("crash")
said["crashed"] = wait_for(services, "dead")
said["died"] = [event.reason for event in services.take_events() if hasattr(event, "reason")]
start("misconfigured")
said["refused"] = wait_for(services, "refused")
start("obey")
said["anew"] = wait_for(services, "ready")
said["told"] = [type(event).__name__ for event in services.take_events()]

other = RayServices("seats")
other.adopt({{"decode-0": "a", "decode-1": "a"}})
said["missed"] = state_of(other, "decode-1")
said["adopted"] = wait_for(other, "ready")
actor = ray.get_actor("decode-0", namespace="seats")
calls = [actor.wait_end.remote(60.0), actor.health.remote(wanted)]
said["answers_meanwhile"] = ray.wait(calls)[0] == calls[1:]
other.drain("decode-0")
said["drained"] = wait_for(other, "ended")
other.forget("decode-0")
said["left"] = sorted(other.revisions)
ray.shutdown()
print(json.dumps(said))
"""
TIMEOUT_S = 200.0


@pytest.fixture(scope="module")
def said() -> dict[str, Any]:
    return said_on_a_cluster(PROGRAM, timeout_s=TIMEOUT_S)


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_refused_service_is_started_anew_under_its_name(said: dict[str, Any]) -> None:
    assert said["refused"][-1] == "refused"
    assert said["anew"][0] == "pending"
    assert said["anew"][-1] == "ready"
    assert said["told"].count("ServiceEnded") == 1


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_crash_is_told_by_its_error_though_ray_knows_an_exit_code_alone(
    said: dict[str, Any],
) -> None:
    assert said["crashed"][-1] == "dead"
    assert said["died"] == ["ValueError: no kernel for this model"]


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_new_controller_sees_whom_it_finds_as_adopted_until_it_answers(
    said: dict[str, Any],
) -> None:
    assert said["adopted"][0] == "adopted"
    assert set(said["adopted"][1:]) <= {"adopted", "ready"}
    assert said["missed"] == "dead"
    assert said["drained"] == ["draining", "ended"]
    assert said["left"] == ["decode-1"]


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_service_answers_while_somebody_waits_for_its_end(said: dict[str, Any]) -> None:
    assert said["answers_meanwhile"]


@pytest.mark.parametrize("actor", [ServiceActor, Controller])
def test_no_method_of_an_actor_whose_calls_may_wait_is_a_coroutine(actor: type) -> None:
    """A single one, private or not, has Ray run all calls of the actor one after another."""
    assert inspect.getmembers(actor, predicate=inspect.iscoroutinefunction) == []


class Frozen:
    """An actor that answers nothing."""

    def __getattr__(self, _method: str) -> "Frozen":
        return self

    def remote(self, *_arguments: object) -> object:
        return object()


@pytest.mark.parametrize(
    ("acts_s", "waits_s", "silences"),
    [(0.0, 1.0, [1.0, 2.0, 3.0]), (500.0, 1.0, [1.0, 2.0, 3.0]), (0.0, 500.0, [1.0, 2.0, 3.0])],
    ids=["frozen", "slow-to-act", "itself-frozen"],
)
def test_silence_counts_only_while_somebody_listens(
    acts_s: float, waits_s: float, silences: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0

    def wait(
        *_arguments: object, timeout: float, **_options: object
    ) -> tuple[list[Any], list[Any]]:
        nonlocal now
        now += waits_s if timeout else 0.0
        return [], []

    monkeypatch.setattr(ray_services.ray, "wait", wait)
    monkeypatch.setattr(ray_services.ray, "get_actor", lambda *_name, **_where: Frozen())
    services = RayServices("frozen", clock=lambda: now)
    services.adopt({"decode-0": "a"})
    heard: list[float] = []
    for _ in silences:
        now += acts_s
        heard.append(services.observe(1.0, DesiredWorkers(0, 0, 1))["decode-0"].silence_s)
    assert heard == silences


def test_without_services_it_waits_instead_of_looking_again_and_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waits: list[float] = []
    own = SimpleNamespace(sleep=waits.append)  # other threads of this process sleep, too
    monkeypatch.setattr(ray_services, "time", own)
    assert RayServices("nobody").observe(1.0, DesiredWorkers(0, 0, 1)) == {}
    assert waits == [1.0]


class Room:
    """Where actors are created; each creation notes how far the services say to be."""

    def __init__(self, *, is_taken: bool) -> None:
        self._is_taken = is_taken
        self.progress: list[int] = []
        self.services = RayServices("room")

    def options(self, **_options: object) -> "Room":
        return self

    def remote(self, *_arguments: object) -> object:
        self.progress.append(self.services.num_calls)
        if self._is_taken:
            raise ValueError("the name is taken")
        return object()


@pytest.mark.parametrize("is_taken", [False, True])
def test_each_of_many_starts_in_a_row_is_progress_though_the_name_be_taken(
    *, is_taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or a hundred of them, each slow, would seem to be one that hangs."""
    room = Room(is_taken=is_taken)
    monkeypatch.setattr(ray_services, "RemoteServiceActor", room)
    plan = IdlePlan(("obey", "obey"))
    names = [f"decode-{number}" for number in range(5)]
    for name in names:
        room.services.start(name, "decode", "a", plan.launch("decode", name))
    assert room.progress == sorted(set(room.progress))
    if is_taken:
        room.progress.clear()
        assert room.services.nameless == names
        for name in names:
            room.services.claim_name(name)
        assert room.progress == sorted(set(room.progress))


def test_each_answer_that_does_not_come_after_all_is_progress(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    progress: list[int] = []
    services = RayServices("late")

    def wait(calls: list[object], **_options: object) -> tuple[list[object], list[object]]:
        return calls, []

    def get(_call: object, *, timeout: float) -> object:
        assert timeout > 0
        progress.append(services.num_calls)
        raise GetTimeoutError

    monkeypatch.setattr(ray_services.ray, "wait", wait)
    monkeypatch.setattr(ray_services.ray, "get", get)
    monkeypatch.setattr(ray_services.ray, "get_actor", lambda *_name, **_where: Frozen())
    services.adopt({f"decode-{number}": "a" for number in range(5)})
    services.observe(1.0, DesiredWorkers(0, 0, 1))
    assert len(progress) == 5
    assert progress == sorted(set(progress))
