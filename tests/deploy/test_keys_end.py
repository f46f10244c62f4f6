"""A deployment's keys end with it, however it ends.

The failure guarded against: a plan, and the secret keys in it, that stays in the cluster's store
after its driver was killed, where whoever joins the cluster can read it.
"""

import json
import subprocess
import sys

import psutil
import pytest

from tests.deploy.ray_cluster import HEAD, ROOT, RayCluster, kill, wait_until

SECRET = "a-secret-of-the-plan"  # noqa: S105
DRIVER = f"""
import sys, time
from tests.deploy.small_deployment import IdlePlan
import ray
from deploy.supervision.events import EventQueue, ProcessStarted
from deploy.supervision.supervisor import Supervisor

ray.init(sys.argv[1], logging_level="ERROR", log_to_driver=False, _node_ip_address={HEAD!r})
events = EventQueue()
supervisor = Supervisor(
    IdlePlan(("obey", sys.argv[2]), revision_of_all={SECRET!r}), events, private=False
)
supervisor.start()
started = set()
while len(started) < 2:
    event = events.get(timeout=60)
    if isinstance(event, ProcessStarted):
        started.add(event.name)
print("up", flush=True)
if sys.argv[2] == "hang":
    supervisor.stop()
time.sleep(600)
"""
LOOK = f"""
import json, sys
import ray
from ray.experimental.internal_kv import _internal_kv_get, _internal_kv_list

ray.init(sys.argv[1], logging_level="ERROR", log_to_driver=False, _node_ip_address={HEAD!r})
space = b"sluice-sluice"
keys = _internal_kv_list(b"", namespace=space)
held = [k for k in keys if {SECRET.encode()!r} in _internal_kv_get(k, namespace=space)]
print(json.dumps([key.decode() for key in held]))
"""
TIMEOUT_S = 60.0

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(300)]


def program(cluster: RayCluster, text: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", text, cluster.address, *arguments],
        env=cluster.environment | {"PYTHONPATH": str(ROOT), "RAY_ADDRESS": cluster.address},
        stdout=subprocess.PIPE,
        text=True,
        cwd="/",
    )


def holders(cluster: RayCluster) -> list[str]:
    """Return the keys under which the cluster's store has the secret."""
    said, _ = program(cluster, LOOK).communicate(timeout=TIMEOUT_S)
    held: list[str] = json.loads(said.splitlines()[-1])
    return held


def controllers(cluster: RayCluster) -> list[psutil.Process]:
    return [each for each, title in cluster.ours().items() if title.startswith("ray::Controller")]


@pytest.mark.parametrize("with_controller", [False, True], ids=["driver", "driver-and-controller"])
def test_a_killed_driver_leaves_neither_processes_nor_keys(*, with_controller: bool) -> None:
    with RayCluster.open({}) as cluster:
        driver = program(cluster, DRIVER, "obey")
        assert driver.stdout is not None
        assert driver.stdout.readline() == "up\n"
        assert [key.partition(":")[0] for key in holders(cluster)] == ["wanted"]

        # When the driver is killed, and with it, as on a machine that is lost, the controller
        victims = controllers(cluster) if with_controller else []
        for process in [psutil.Process(driver.pid), *victims]:
            kill(process)
        driver.wait(TIMEOUT_S)

        # Then all has ended soon, and nobody can read the keys
        wait_until(lambda: not cluster.living_actors(), "no actor alive")
        assert holders(cluster) == []


def test_a_driver_that_is_killed_amid_its_stop_leaves_neither_processes_nor_keys() -> None:
    with RayCluster.open({}) as cluster:
        # Given one that waits for a service that does not stop, as after `ray job stop`
        driver = program(cluster, DRIVER, "hang")
        assert driver.stdout is not None
        assert driver.stdout.readline() == "up\n"
        wait_until(lambda: not controllers(cluster), "the controller is gone")

        # When it is killed
        kill(psutil.Process(driver.pid))
        driver.wait(TIMEOUT_S)

        # Then as above
        wait_until(lambda: not cluster.living_actors(), "no actor alive")
        assert holders(cluster) == []
