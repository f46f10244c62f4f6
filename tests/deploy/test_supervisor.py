"""The driver goes by the plan that holds by now, which an update may have changed since the start.

The failures guarded against: a wait for room told with numbers that nobody asks for any more, a
controller ended too early or too late after an update, and a driver that fails or hangs where Ray
does not tell the plan.
"""

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RayActorError

from core.channel import DeploymentKeys
from core.config import SluiceConfig
from core.errors import SluiceError
from deploy.supervision import supervisor as module
from deploy.supervision import wanted
from deploy.supervision.control_loop import Row
from deploy.supervision.events import EventQueue, GaveUp
from deploy.supervision.lookup import namespace_of
from deploy.supervision.plan import DeploymentPlan
from deploy.supervision.stop_signals import StopInterrupt
from deploy.supervision.supervisor import EVENTS_WAIT_S, STOP_LOOK_S, Supervisor
from deploy.supervision.wanted import Beginning, WantedStore, first_wanted

CONFIG: dict[str, Any] = {
    "decode_resources": {"old": 1.0},
    "progress_timeout_s": 20.0,
    "stop_timeout_s": 30.0,
}
PENDING = Row("decode-0", "decode", "pending", "a")
TIMEOUT_S = 60.0


def plan_of(**deploy: object) -> DeploymentPlan:
    return DeploymentPlan(
        config=SluiceConfig.model_validate({"deploy": CONFIG | deploy}),
        model_path=Path("/model"),
        served_name="model",
        keys=DeploymentKeys.generate(),
        host="host",
        router_address="tcp://host:1",
        own_router=True,
        private=False,
        num_gpus=0.0,
        environment={},
    )


class Cluster:
    """Stands in for Ray: its store, and a controller that answers until it freezes."""

    def __init__(self) -> None:
        self.stored: dict[bytes, bytes] = {}
        self.store_answers: Any = lambda: None
        """Called at each look at the store; raises or waits where Ray would."""
        self.num_recalls = 0
        self.is_frozen = False
        self.num_silent_looks = 0
        self.silence_at_kill_s: float | None = None
        self.num_lost_kills = 0
        """How many kills do nothing: the first raises, the others are lost on their way."""
        self.num_kills = 0
        self.grace_s: float | None = None
        remote = SimpleNamespace
        self.controller = SimpleNamespace(
            services=remote(remote=lambda: [PENDING]),
            apply=remote(remote=lambda _config: "applied"),
            events=remote(remote=lambda *_: "events"),
            _actor_id=SimpleNamespace(hex=lambda: "controller"),
        )

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(wanted, "_internal_kv_get", self._get)
        monkeypatch.setattr(wanted, "_internal_kv_put", self._put)
        monkeypatch.setattr(wanted, "_internal_kv_del", self._delete)
        monkeypatch.setattr(module, "find_controller", lambda _namespace: self.controller)
        monkeypatch.setattr(module, "stop_all", self._stop_all)
        for name in ("get", "wait", "kill"):
            monkeypatch.setattr(module.ray, name, getattr(self, f"_ray_{name}"))
        for name in ("cluster_resources", "available_resources"):
            monkeypatch.setattr(module.ray, name, lambda: {"old": 1.0})

    def store(self, plan: DeploymentPlan) -> None:
        WantedStore(
            namespace_of(plan.deploy.name), Beginning(first_wanted(plan)), "controller"
        ).begin()
        self.num_recalls = 0

    def _get(self, key: bytes, *, namespace: bytes) -> bytes | None:
        self.store_answers()
        self.num_recalls += key.startswith(b"wanted:")
        return self.stored.get(namespace + key)

    def _put(self, key: bytes, content: bytes, *, namespace: bytes) -> None:
        self.stored[namespace + key] = content

    def _delete(self, key: bytes, *, namespace: bytes) -> None:
        self.stored.pop(namespace + key, None)

    def _stop_all(self, _namespace: str, grace_s: float, *, of: object) -> None:
        assert of is self.controller
        self.grace_s = grace_s

    def _ray_get(self, call: Any, timeout: float | None = None) -> Any:  # noqa: ARG002 - as Ray's
        if call != "events":
            return call
        if self.is_frozen:
            raise RayActorError
        self.is_frozen = True
        return 1, 0, []

    def _ray_wait(self, calls: list[Any], *, timeout: float) -> tuple[list[Any], list[Any]]:
        if not self.is_frozen or self.silence_at_kill_s is not None:
            return calls, []
        assert timeout == STOP_LOOK_S
        self.num_silent_looks += 1
        return [], calls

    def _ray_kill(self, actor: object, *, no_restart: bool) -> None:
        assert actor is self.controller
        assert not no_restart
        self.num_kills += 1
        if self.num_kills == 1 <= self.num_lost_kills:
            raise RuntimeError("Ray's control service is away")
        if self.num_kills <= self.num_lost_kills:
            return
        self.silence_at_kill_s = self.num_silent_looks * STOP_LOOK_S


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    cluster = Cluster()
    cluster.install(monkeypatch)
    # What answers here does so without a wait, if only its thread has its turn.
    for bound in ("RECALL_TIMEOUT_S", "CALL_TIMEOUT_S"):
        monkeypatch.setattr(module, bound, TIMEOUT_S)
    return cluster


def supervisor_of(cluster: Cluster) -> Supervisor:
    supervisor = Supervisor(plan_of(), EventQueue(), private=False)
    supervisor._controller = cluster.controller
    return supervisor


def silence_until_ended(cluster: Cluster) -> float:
    """Return for how long the controller, frozen after its first answer, was left alone."""
    events = EventQueue()
    supervisor = Supervisor(plan_of(), events, private=False)
    assert supervisor.resume()
    assert isinstance(events.get(timeout=TIMEOUT_S), GaveUp)
    supervisor.leave()
    assert cluster.silence_at_kill_s is not None
    return cluster.silence_at_kill_s


@pytest.mark.parametrize(
    "ask",
    [
        lambda supervisor: supervisor.services(),
        lambda supervisor: supervisor.waits(),
        lambda supervisor: supervisor.apply(SluiceConfig()),
    ],
    ids=["services", "waits", "apply"],
)
def test_a_stop_ends_the_wait_for_a_controller_that_does_not_answer(
    ask: Any, cluster: Cluster
) -> None:
    cluster.is_frozen = True
    supervisor = Supervisor(
        plan_of(),
        EventQueue(),
        private=False,
        is_stop_asked=lambda: cluster.num_silent_looks == 2,
    )
    supervisor._controller = cluster.controller
    with pytest.raises(StopInterrupt):
        ask(supervisor)


def test_a_controller_that_does_not_answer_in_time_is_told_and_has_no_services(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CALL_TIMEOUT_S", 0.05)
    cluster.is_frozen = True
    supervisor = supervisor_of(cluster)
    assert supervisor.services() == []
    with pytest.raises(SluiceError, match="the controller does not answer"):
        supervisor.apply(SluiceConfig())


def refuse() -> None:
    raise RuntimeError("Ray's control service is away")


def test_a_wait_for_room_is_told_by_what_an_update_has_changed(cluster: Cluster) -> None:
    supervisor = supervisor_of(cluster)
    cluster.store(plan_of(decode_resources={"new": 2.0}))
    told = supervisor.waits()
    assert told is not None
    assert "new 2" in told
    assert "old" not in told


def test_a_wait_for_room_is_told_by_the_first_plan_where_none_is_stored(cluster: Cluster) -> None:
    assert "old 1" in (supervisor_of(cluster).waits() or "")


def test_a_store_that_fails_or_hangs_leaves_the_driver_with_the_plan_of_its_start(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "RECALL_TIMEOUT_S", 0.05)
    supervisor = supervisor_of(cluster)
    cluster.store(plan_of(decode_resources={"new": 2.0}, stop_timeout_s=100.0))
    goes_on = threading.Event()
    for answers in (refuse, lambda: goes_on.wait(TIMEOUT_S)):
        cluster.store_answers = answers
        assert "old 1" in (supervisor.waits() or "")
        supervisor.stop()
        assert cluster.grace_s == CONFIG["stop_timeout_s"] - module.KILL_RESERVE_S
    goes_on.set()


def test_the_stop_has_the_time_that_an_update_has_given_it(cluster: Cluster) -> None:
    cluster.store(plan_of(stop_timeout_s=100.0))
    supervisor_of(cluster).stop()
    assert cluster.grace_s == 100.0 - module.KILL_RESERVE_S


@pytest.mark.parametrize("progress_timeout_s", [5.0, 20.0, 50.0])
def test_a_silent_controller_is_ended_by_the_limit_that_holds_by_now_asked_for_once(
    cluster: Cluster, progress_timeout_s: float
) -> None:
    cluster.store(plan_of(progress_timeout_s=progress_timeout_s))
    silence_s = silence_until_ended(cluster)
    assert silence_s == pytest.approx(EVENTS_WAIT_S + progress_timeout_s, abs=STOP_LOOK_S)
    assert cluster.num_recalls == 1


def test_a_silent_controller_is_ended_though_the_store_fails_too(cluster: Cluster) -> None:
    cluster.store(plan_of(progress_timeout_s=50.0))
    cluster.store_answers = refuse
    silence_s = silence_until_ended(cluster)
    assert silence_s == pytest.approx(EVENTS_WAIT_S + CONFIG["progress_timeout_s"], abs=STOP_LOOK_S)


def test_a_kill_that_fails_or_is_lost_is_told_again(cluster: Cluster) -> None:
    cluster.store(plan_of(progress_timeout_s=5.0))
    cluster.num_lost_kills = 2
    silence_s = silence_until_ended(cluster)
    assert cluster.num_kills == 3
    assert silence_s == pytest.approx(3 * (EVENTS_WAIT_S + 5.0), abs=3 * STOP_LOOK_S)
