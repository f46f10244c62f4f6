"""A node with another version of the code than the controller's says so, and serves nothing.

The failure guarded against: a worker of a new image that reads an old controller's words by its own
order of fields, and serves with values that nobody has set.
"""

import subprocess
import sys

import pytest

from core.version import VERSION
from tests.deploy.ray_cluster import ROOT

PROGRAM = """
import sys
from deploy.supervision.actors import ServiceActor
from tests.deploy.small_deployment import IdleService

class Service(IdleService):
    async def run(self, lifecycle):
        print("served")
        lifecycle.stop.set()

actor = ServiceActor(Service("decode-0"), version=sys.argv[1])
print(actor.wait_end(30.0).error)
"""


REFUSAL = (
    f"this node has Sluice {VERSION}, and the controller 0.0.1: a deployment runs one version; "
    "give all nodes the same image and start it anew (in the chart: ray.upgradeStrategy=Recreate)"
)


@pytest.mark.parametrize(("version", "said"), [(VERSION, ["served", "None"]), ("0.0.1", [REFUSAL])])
def test_a_service_runs_only_by_the_code_that_its_controller_has(
    version: str, said: list[str]
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, version],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == said
