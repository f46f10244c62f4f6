"""A limit of supervision that is changed while the deployment runs holds at once.

The failure guarded against: a changed time-out that is accepted, stored, and never looked at.
"""

import json
import subprocess
import sys

import pytest

from tests.deploy.ray_cluster import HEAD, ROOT, RayCluster

PROGRAM = f"""
import json, os, signal, sys, time
from dataclasses import dataclass, replace
from tests.deploy.small_deployment import CONFIG, IdlePlan
import ray
from core.config import DeployConfig
from deploy.supervision.events import EventQueue, ProcessDied, ProcessStarted
from deploy.supervision.outcome import Taken
from deploy.supervision.supervisor import Supervisor

ray.init(sys.argv[1], logging_level="ERROR", log_to_driver=False, _node_ip_address={HEAD!r})

@dataclass(frozen=True)
class Plan(IdlePlan):
    def updated(self, deploy: DeployConfig) -> "Plan":
        return replace(self, deploy=deploy)

events = EventQueue()
supervisor = Supervisor(Plan(("obey", "obey")), events, private=True)
supervisor.start()
pids, died = {{}}, []
while len(pids) < 2:
    event = events.get(timeout=200)
    if isinstance(event, ProcessStarted):
        pids[event.name] = event.identity.pid
first = dict(pids)
new = CONFIG.model_copy(update={{"progress_timeout_s": 10.0, "stop_timeout_s": 9.0}})
assert ray.get(supervisor._controller.update.remote(new), timeout=60) == Taken()
while {{row.name: row.state for row in supervisor.services()}}.get("decode-0") != "ready":
    time.sleep(0.2)
os.kill(pids["decode-0"], signal.SIGSTOP)
while pids == first:
    event = events.get(timeout=200)
    if isinstance(event, ProcessDied):
        died.append(event.name)
    if isinstance(event, ProcessStarted):
        pids[event.name] = event.identity.pid
said = {{
    "died": died,
    "anew": [name for name in pids if pids[name] != first[name]],
    "stop_timeout_s": supervisor._stop_timeout_s(),
}}
supervisor.stop()
ray.shutdown()
print(json.dumps(said))
"""
TIMEOUT_S = 240.0

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(400)]


def test_a_shorter_limit_ends_who_stands_still_and_nobody_else_is_restarted() -> None:
    with RayCluster.open({}) as cluster:
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, cluster.address],
            env=cluster.environment | {"PYTHONPATH": str(ROOT), "RAY_ADDRESS": cluster.address},
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
            cwd="/",
        )
    assert done.returncode == 0, done.stdout + done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert said == {"died": ["decode-0"], "anew": ["decode-0"], "stop_timeout_s": 9.0}
