"""Two commands at once on one deployment's name: two starts, a start over orphans, two stops.

The failures guarded against: a start that loses and leaves its plan to the winner's controller, one
that waits for ever for names that orphans hold, and a stop that crashes when another was faster.
"""

from typing import Any

import pytest

from tests.deploy.ray_cluster import HEAD, said_on_a_cluster

PROGRAM = f"""
import json, sys, time
from tests.deploy.small_deployment import CONFIG, IdlePlan
import ray
from core.errors import ConfigError
from deploy.supervision import supervisor, wanted
from deploy.supervision.events import EventQueue, ProcessStarted
from deploy.supervision.lookup import find_controller, namespace_of
from deploy.supervision.stopping import stop_all
from deploy.supervision.supervisor import Supervisor

ray.init(sys.argv[1], logging_level="ERROR", log_to_driver=False, _node_ip_address={HEAD!r})
space = namespace_of(CONFIG.name)
said = {{}}

def refused(plan):
    loser = Supervisor(plan, EventQueue(), private=True)
    try:
        loser.start()
    except ConfigError as error:
        return str(error)
    finally:
        loser.stop()

events = EventQueue()
first = Supervisor(IdlePlan(("obey", "obey")), events, private=True)
first.start()
started = set()
while len(started) < 2:
    event = events.get(timeout=60)
    if isinstance(event, ProcessStarted):
        started.add(event.name)
other = IdlePlan(("obey", "obey", "obey"), revision_of_all="other")
said["seen"] = refused(other)
# As it was when the other start looked: first nothing, then services, or no services either.
looks = iter([None])
supervisor.find_controller = lambda namespace: next(looks, find_controller(namespace))
said["raced"] = refused(other)
left_behind, supervisor._left_behind = supervisor._left_behind, lambda namespace: []
looks = iter([None])
said["raced_early"] = refused(other)
supervisor.find_controller, supervisor._left_behind = find_controller, left_behind
said["stored"] = wanted.recall(space).plan.revision_of_all

ray.kill(find_controller(space), no_restart=True)
while find_controller(space) is not None:
    time.sleep(0.1)
said["orphans"] = refused(other)
said["stored_over_orphans"] = wanted.recall(space).plan.revision_of_all

first.leave()
stop_all(space, 5.0)
stop_all(space, 5.0)  # of a second command that found the deployment before the first ended it
again = Supervisor(other, EventQueue(), private=True)
again.start()
ray.get(again._controller.services.remote(), timeout=60)
said["stored_again"] = wanted.recall(space).plan.revision_of_all
again.stop()
said["is_stored"] = wanted.is_stored(space)
ray.shutdown()
print(json.dumps(said))
"""
TIMEOUT_S = 400.0

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(500)]


@pytest.fixture(scope="module")
def said() -> dict[str, Any]:
    return said_on_a_cluster(PROGRAM, timeout_s=TIMEOUT_S)


def test_a_start_that_loses_the_name_is_refused_and_overwrites_nothing(
    said: dict[str, Any],
) -> None:
    for how in ("seen", "raced", "raced_early"):
        assert "a deployment of this name runs on this cluster" in said[how]
        assert "sluice down --name sluice" in said[how]
    assert said["stored"] == "a"


def test_a_start_over_services_without_a_controller_names_them_and_the_way_out(
    said: dict[str, Any],
) -> None:
    assert "decode-0, router of an earlier deployment still run" in said["orphans"]
    assert "run sluice down --name sluice first" in said["orphans"]
    assert said["stored_over_orphans"] == "a"


def test_a_second_stop_ends_well_and_the_name_is_free(said: dict[str, Any]) -> None:
    assert said["stored_again"] == "other"
    assert not said["is_stored"]
