"""What the next controller finds stored: that of its own deployment, and of none that was stopped.

The failures guarded against: a stop that forgets the plan of the start that followed it, a plan
with its keys that a controller stores when its deployment has been stopped already, a controller
that crashes at once again and again for ever, and one that waits for ever for what it stores.
"""

import pytest

from deploy.supervision import wanted
from deploy.supervision.desired import Desired
from deploy.supervision.wanted import (
    MAX_STARTS,
    STARTS_WINDOW_S,
    Beginning,
    StoppedMeanwhileError,
    Wanted,
    WantedStore,
    clear,
    forbid,
    is_stored,
    recall,
    start_id,
)
from tests.deploy.ray_cluster import HEAD, said_on_a_cluster

SPACE = "sluice-test"


@pytest.fixture(autouse=True)
def kept(monkeypatch: pytest.MonkeyPatch) -> dict[bytes, bytes]:
    """Return what is stored: Ray's store is a mapping for every namespace."""
    kept: dict[bytes, bytes] = {}

    def put(key: bytes, content: bytes, *, namespace: bytes) -> None:
        kept[namespace + b"/" + key] = content

    def get(key: bytes, *, namespace: bytes) -> bytes | None:
        return kept.get(namespace + b"/" + key)

    def delete(key: bytes, *, namespace: bytes) -> None:
        kept.pop(namespace + b"/" + key, None)

    class Client:
        """Ray's own, by which a put has a bound."""

        def internal_kv_put(
            self, key: bytes, content: bytes, *, overwrite: bool, namespace: bytes, timeout: float
        ) -> None:
            assert overwrite
            assert timeout == wanted.PUT_TIMEOUT_S
            put(key, content, namespace=namespace)

    monkeypatch.setattr(wanted, "internal_kv_get_gcs_client", Client)
    monkeypatch.setattr(wanted, "_internal_kv_put", put)
    monkeypatch.setattr(wanted, "_internal_kv_get", get)
    monkeypatch.setattr(wanted, "_internal_kv_del", delete)
    return kept


def plan(name: str) -> Wanted:
    return Wanted(name, Desired({}), {})  # of a plan, only that it is the same is looked at


def store_of(name: str, beginning: Beginning | None = None) -> WantedStore:
    return WantedStore(SPACE, beginning or Beginning(plan(name)), f"controller of {name}")


def test_what_was_begun_is_found_and_a_later_life_goes_on_with_what_was_put_since() -> None:
    beginning = Beginning(plan("first"))
    store_of("first", beginning).begin()
    store_of("first", beginning).put(plan("changed"))
    assert store_of("first", beginning).begin() == plan("changed")
    assert recall(SPACE) == plan("changed")


def test_a_stop_forgets_its_own_start_and_not_the_one_that_followed() -> None:
    first, second = store_of("first"), store_of("second")
    first.begin()
    stopped = start_id(SPACE)
    second.begin()
    clear(SPACE, stopped)
    first.wipe()
    assert recall(SPACE) == plan("second")
    clear(SPACE, start_id(SPACE))
    assert not is_stored(SPACE)


def test_mutation_with_one_key_for_all_starts_the_one_that_followed_is_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(wanted, "_key", lambda _start: b"wanted")
    with pytest.raises(AssertionError):
        test_a_stop_forgets_its_own_start_and_not_the_one_that_followed()


def test_a_controller_that_is_killed_before_it_began_leaves_nothing(
    kept: dict[bytes, bytes],
) -> None:
    forbid(SPACE, "controller of late")
    with pytest.raises(StoppedMeanwhileError, match="is being stopped"):
        store_of("late").begin()
    assert not is_stored(SPACE)
    assert not any(b"wanted" in key for key in kept)
    assert store_of("next").begin() == plan("next")


def test_a_start_leaves_no_plan_of_an_earlier_one_behind(kept: dict[bytes, bytes]) -> None:
    for name in ("first", "second"):
        store_of(name).begin()
    assert sum(b"wanted" in key for key in kept) == 1


def test_one_that_takes_over_goes_on_with_what_is_stored_as_a_start_of_its_own() -> None:
    store_of("first").begin()
    former = start_id(SPACE)
    assert store_of("over", Beginning(None)).begin() == plan("first")
    clear(SPACE, former)
    assert recall(SPACE) == plan("first")


def test_one_that_takes_over_finds_nothing_once_the_deployment_was_stopped() -> None:
    store_of("first").begin()
    clear(SPACE, start_id(SPACE))
    with pytest.raises(StoppedMeanwhileError, match="it was stopped meanwhile"):
        store_of("over", Beginning(None)).begin()


def test_nothing_is_put_after_what_was_wiped() -> None:
    store = store_of("first")
    store.begin()
    store.wipe()
    store.put(plan("first"))
    assert not is_stored(SPACE)


def test_too_many_starts_in_a_minute_are_the_last_until_somebody_takes_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 1000.0
    monkeypatch.setattr(wanted.time, "time", lambda: now)
    store = store_of("first")
    store.begin()
    for _ in range(MAX_STARTS):
        store.count_start()
        now += 1.0
    with pytest.raises(RuntimeError, match=f"it crashed {MAX_STARTS} times in 6 s; see its log"):
        store.count_start()

    # One that takes over may start, and so may one whose crashes are long ago
    over = store_of("over", Beginning(None))
    over.begin()
    for _ in range(MAX_STARTS * 2):
        over.count_start()
        now += STARTS_WINDOW_S / MAX_STARTS


PROGRAM = f"""
import json, os, signal, sys, time
import psutil
import ray
from deploy.supervision import wanted
from deploy.supervision.desired import Desired
from ray.exceptions import RpcError

ray.init(sys.argv[1], logging_level="ERROR", log_to_driver=False, _node_ip_address={HEAD!r})
port = sys.argv[1].rpartition(":")[2]
(control_service,) = [
    process
    for process in psutil.process_iter(["name", "cmdline"])
    if f"--gcs_server_port={{port}}" in (process.info["cmdline"] or ())
    and process.info["name"] == "gcs_server"
]
def plan(name):
    return wanted.Wanted(name, Desired({{}}), {{}})

store = wanted.WantedStore("space", wanted.Beginning(plan("first")), "controller")
store.begin()
said = {{"begun": wanted.recall("space").plan}}
store.put(plan("second"))
said["put"] = wanted.recall("space").plan
wanted.PUT_TIMEOUT_S = 2.0
control_service.suspend()
try:
    store.put(plan("third"))
except RpcError as error:
    said["stopped"] = str(error)
finally:
    control_service.resume()
wanted.PUT_TIMEOUT_S = 60.0
store.put(plan("fourth"))
said["goes_on"] = wanted.recall("space").plan
ray.shutdown()
print(json.dumps(said))
"""


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_what_a_stopped_control_service_does_not_take_is_given_up_in_time() -> None:
    said = said_on_a_cluster(PROGRAM, timeout_s=200.0)
    assert "Deadline" in said.pop("stopped")
    assert said == {"begun": "first", "put": "second", "goes_on": "fourth"}
