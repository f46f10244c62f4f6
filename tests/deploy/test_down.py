"""What a controller has left behind when it stays down can still be stopped by ``sluice down``.

The failure guarded against: detached workers that hold their GPUs for ever, while ``sluice down``
says that there is no such deployment.
"""

import subprocess
import sys

import pytest

from tests.deploy.ray_cluster import HEAD, ROOT, RayCluster

STORE = f"""
import sys, ray
from deploy.supervision.wanted import Beginning, Wanted, WantedStore
from deploy.supervision.desired import Desired

ray.init(sys.argv[1], logging_level="ERROR", _node_ip_address={HEAD!r})
left = Wanted("no plan", Desired({{}}), {{"decode-0": "gone, too"}})
WantedStore("sluice-left", Beginning(left), "a controller that is gone").begin()
"""
TIMEOUT_S = 100.0

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(300)]


def run(cluster: RayCluster, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        env=cluster.environment | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
        cwd="/",
    )


def test_a_deployment_without_a_controller_cannot_be_scaled_but_stopped_once() -> None:
    with RayCluster.open({}) as cluster:
        stored = run(cluster, "-c", STORE, cluster.address)
        assert stored.returncode == 0, stored.stderr
        asked = ("--name=left", f"--address={cluster.address}")

        scaled = run(cluster, "-m", "deploy.main", "scale", "decode=2", *asked)
        stopped, again = (run(cluster, "-m", "deploy.main", "down", *asked) for _ in range(2))

    assert "the controller of 'left' stays down" in scaled.stderr
    assert stopped.returncode == 0, stopped.stderr
    assert "no deployment called 'left' runs there" in again.stderr
