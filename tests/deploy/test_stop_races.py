"""A stop beside a start of the same name, and a controller that stays down: nothing is lost.

The failures guarded against: a stop that forgets the plan of the deployment that was started after
it, services that are started while their deployment is stopped and that nobody finds, a driver that
stops its successor's deployment, and a controller that crashes for ever or ends its services.
"""

from typing import Any

import pytest

from tests.deploy.ray_cluster import HEAD, said_on_a_cluster

PROGRAM = f"""
import json, sys, time
from dataclasses import replace
from tests.deploy.small_deployment import CONFIG, IdlePlan
import ray
from ray import cloudpickle
from ray.exceptions import RayError
from ray.experimental.internal_kv import _internal_kv_put
from core.errors import SluiceError
from deploy.supervision import wanted
from deploy.supervision.events import EventQueue, StopRequested
from deploy.supervision.lookup import find_controller, namespace_of, services_of
from deploy.supervision.outcome import Taken
from deploy.supervision.stopping import stop_all
from deploy.supervision.supervisor import Supervisor

ray.init(sys.argv[1], logging_level="ERROR", log_to_driver=False, _node_ip_address={HEAD!r})
space = namespace_of(CONFIG.name)
said = {{}}
BOUND_S = 90.0

def until(holds):
    deadline = time.monotonic() + BOUND_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.2)

def deployment(revision):
    plan = IdlePlan(("obey", "obey"), revision_of_all=revision)
    return Supervisor(plan, EventQueue(), private=True)

def ask(method, *arguments):
    try:
        return ray.get(getattr(find_controller(space), method).remote(*arguments), timeout=BOUND_S)
    except (RayError, AttributeError):
        return None

def is_whole(revision):
    seen = {{row.name: (row.state, row.revision) for row in ask("services") or []}}
    return seen == dict.fromkeys(("router", "decode-0"), ("ready", revision))

def pids():
    calls = {{name: service.identity.remote() for name, service in services_of(space).items()}}
    return {{name: ray.get(call, timeout=BOUND_S).pid for name, call in calls.items()}}

def left():
    return [sorted(services_of(space)), find_controller(space) is None, wanted.is_stored(space)]

def last_word(of):
    # By what event or error the driver of a deployment hears that it has no controller.
    deadline = time.monotonic() + BOUND_S
    while time.monotonic() < deadline:
        try:
            if isinstance(of.next_event(BOUND_S), StopRequested):
                return "stop"
        except SluiceError as error:
            return str(error)
    return None

# A stop that comes before the controller has begun, or has started anything, or just then.
said["early"] = []
for wait_s in (0.0, 1.0, 3.0):
    early = deployment("early")
    early.start()
    time.sleep(wait_s)
    stop_all(space, 8.0)
    time.sleep(1.0)
    said["early"].append(left())
    early.leave()

# A start that comes when all services of the former are stopped, and the stop is not at its end.
first, second = deployment("first"), deployment("second")
first.start()
until(lambda: is_whole("first"))
clear = wanted.clear

def clear_and_expect_the_last(*arguments):
    wanted.clear = start_and_clear  # the first one comes before the services are stopped
    clear(*arguments)

def start_and_clear(*arguments):
    wanted.clear = clear
    second.start()
    until(lambda: is_whole("second"))
    clear(*arguments)

wanted.clear = clear_and_expect_the_last
stop_all(space, 5.0)
said["stored"] = wanted.is_stored(space) and wanted.recall(space).plan.revision_of_all
there = pids()
life = ask("events", 0, 0, 0.0)[0]
ray.kill(find_controller(space), no_restart=False)
until(lambda: (ask("events", 0, 0, 0.0) or [life])[0] != life)
until(lambda: is_whole("second"))
said["goes_on"] = pids() == there

# The former driver hears of it later.
said["first_told"] = last_word(first)
first.stop()
said["spared"] = pids() == there and is_whole("second")
if not said["spared"]:
    print(json.dumps(said))
    sys.exit()

# The controller has crashed as often as it may, and once more.
_internal_kv_put(
    wanted.START_TIMES,
    cloudpickle.dumps([time.time() + 1000] * wanted.MAX_STARTS),
    namespace=space.encode(),
)
ray.kill(find_controller(space), no_restart=False)
said["second_told"] = last_word(second)
second.leave()
until(lambda: find_controller(space) is None)
said["go_on"] = pids() == there

# The next command gives them a new one.
third = deployment("third")
said["resumed"] = third.resume()
until(lambda: is_whole("second"))
said["same"] = pids() == there
said["scaled"] = ask("scale", {{"decode": 2}}, {{}}) == Taken()
until(lambda: len(pids()) == 3)
third.stop()
said["left"] = left()
ray.shutdown()
print(json.dumps(said))
"""
TIMEOUT_S = 800.0

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(900)]
NOTHING = [[], True, False]
"""No service, no controller, and no plan."""


@pytest.fixture(scope="module")
def said() -> dict[str, Any]:
    return said_on_a_cluster(PROGRAM, timeout_s=TIMEOUT_S)


def test_a_stop_amid_a_start_leaves_nothing(said: dict[str, Any]) -> None:
    assert said["early"] == [NOTHING] * 3


def test_a_start_amid_a_stop_is_a_whole_deployment_that_outlives_its_controller(
    said: dict[str, Any],
) -> None:
    assert said["stored"] == "second"
    assert said["goes_on"]


def test_a_driver_whose_deployment_was_stopped_spares_the_one_that_followed(
    said: dict[str, Any],
) -> None:
    assert said["first_told"] == "stop"
    assert said["spared"]


def test_a_controller_that_crashed_too_often_stays_down_and_its_services_go_on(
    said: dict[str, Any],
) -> None:
    assert "controller stays down: " in said["second_told"]
    assert "it crashed 6 times in" in said["second_told"]
    assert "\n" not in said["second_told"]
    assert said["go_on"]


def test_the_next_command_gives_the_services_a_controller_and_starts_none_of_them_anew(
    said: dict[str, Any],
) -> None:
    assert said["resumed"]
    assert said["same"]
    assert said["scaled"]
    assert said["left"] == NOTHING
