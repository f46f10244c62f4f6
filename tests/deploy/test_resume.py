"""``sluice workers`` gives a deployment a new controller, while its workers serve all the time.

The failure guarded against: a controller that stays down and takes clients' answers along, that no
router tells of, or whose successor starts the workers a second time.
"""

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from core.key_files import write_keys
from deploy.api_client import ApiClient, UnreachableError
from tests.deploy.load import Load
from tests.deploy.ray_cluster import (
    COMMAND_TIMEOUT_S,
    HEAD,
    LOOPBACK,
    ROOT,
    RayCluster,
    kill,
    wait_until,
)
from tests.free_ports import free_port
from tests.integration.models import VOCAB_SIZE, tiny_model
from tests.integration.requests import generate_reference, prompt_of

CRASHES = f"""
import sys, time, ray
from ray import cloudpickle
from ray.experimental.internal_kv import _internal_kv_put
from deploy.supervision.wanted import MAX_STARTS, START_TIMES

ray.init(sys.argv[1], logging_level="ERROR", log_to_driver=False, _node_ip_address={HEAD!r})
starts = cloudpickle.dumps([time.time() + 1000] * MAX_STARTS)
_internal_kv_put(START_TIMES, starts, namespace=b"sluice-resumed")
"""
"""As if the controller had crashed as often as it may."""
SILENT_S = 5.0
NUM_TOKENS = 96
PROMPT_LENGTHS = (20, 150)

pytestmark = [pytest.mark.ray, pytest.mark.ucx, pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture
def cluster() -> Iterator[RayCluster]:
    with RayCluster.open({"127.0.0.5": 4}) as cluster:
        yield cluster


class Workers:
    """Detached workers on a cluster, and a router of its own beside it."""

    def __init__(self, cluster: RayCluster, model: Path, folder: Path) -> None:
        self._cluster = cluster
        write_keys(folder / "keys")
        port, control = (free_port() for _ in range(2))
        self.client = ApiClient(f"http://{LOOPBACK}:{port}", timeout_s=60)
        self._file = folder / "config.yaml"
        config = {
            "model": {
                "model": str(model),
                "served_name": "model",
                "dtype": "float32",
                "device": "cpu",
            },
            "engine": {"num_threads": 1},
            "cache": {"num_blocks": 256},
            "router": {
                "port": port,
                "control_port": control,
                "control_address": f"tcp://{LOOPBACK}:{control}",
                "local_prefill_max_tokens": 32,
            },
            "security": {"keys_dir": str(folder / "keys")},
            "deploy": {
                "name": "resumed",
                "ray_address": cluster.address,
                "lifetime": "detached",
            },
        }
        self._file.write_text(yaml.safe_dump(config))

    def router(self) -> subprocess.Popen[bytes]:
        """Start the router."""
        command = (sys.executable, "-m", "deploy.main", "router", "--config", str(self._file))
        return subprocess.Popen(command, cwd=ROOT, env=self._cluster.environment)

    def run(self) -> None:
        """Run the command until it leaves the workers."""
        self._cluster.run("deploy.main", "workers", "--config", str(self._file))

    def ask(self, command: str, *arguments: str) -> None:
        """Run ``sluice COMMAND`` for them."""
        at = ("--name=resumed", f"--address={self._cluster.address}")
        self._cluster.run("deploy.main", command, *arguments, *at)

    def lives(self) -> dict[str, int]:
        """Return the incarnations of those that serve; one that is late just now is none."""
        try:
            return {w.worker_id: w.incarnation for w in self.client.workers() if w.state == "ready"}
        except UnreachableError:
            return {}

    def silence_s(self) -> float | None:
        """Return for how long the controller has been silent, as the router knows."""
        try:
            return self.client.status().controller_silence_s
        except UnreachableError:
            return None


def test_a_new_controller_takes_the_workers_over_and_no_answer_is_cut(
    cluster: RayCluster, tmp_path: Path
) -> None:
    model = tiny_model("llama", tmp_path / "model")
    prompts = [prompt_of(length, VOCAB_SIZE, seed=3) for length in PROMPT_LENGTHS]
    expected = generate_reference(model, prompts, num_tokens=NUM_TOKENS)
    workers = Workers(cluster, model, tmp_path)
    router = workers.router()
    try:
        workers.run()
        wait_until(lambda: len(workers.lives()) == 2, "both workers at the router")
        lives = workers.lives()
        with Load(workers.client.url, prompts, expected) as load:
            # When the controller is killed once too often, then it is gone for good
            marked = subprocess.run(
                [sys.executable, "-c", CRASHES, cluster.address],
                env=cluster.environment | {"PYTHONPATH": str(ROOT)},
                timeout=COMMAND_TIMEOUT_S,
                check=False,
            )
            assert marked.returncode == 0
            (controller,) = (
                p for p, title in cluster.ours().items() if title.startswith("ray::Controller")
            )
            kill(controller)
            wait_until(lambda: "Controller" not in cluster.living_actors(), "no controller")
            wait_until(lambda: (workers.silence_s() or 0.0) > SILENT_S, "nobody supervises")
            load.wait_for_more(8)
            wait_until(lambda: workers.lives() == lives, "the same workers")

            # When the command is run again, then there is one, and the workers are the same
            workers.run()
            assert cluster.living_actors().count("Controller") == 1
            wait_until(lambda: (workers.silence_s() or SILENT_S) < SILENT_S, "somebody supervises")
            load.wait_for_more(8)
            wait_until(lambda: workers.lives() == lives, "the same workers")

            # And it does what a controller does
            workers.ask("scale", "decode=2")
            wait_until(lambda: len(workers.lives()) == 3, "one more worker")
            wait_until(lambda: lives.items() <= workers.lives().items(), "the same beside it")
            load.wait_for_more(8)
        workers.ask("down")
        wait_until(lambda: not cluster.living_actors(), "no actor alive")
    finally:
        router.send_signal(signal.SIGTERM)
        router.wait(60)
