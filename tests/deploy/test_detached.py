"""A deployment that outlives the command that started it, on a real Ray cluster with few places.

The failures guarded against: a detached deployment that ends with its driver, with a later command
that cannot be carried out, or not with ``sluice down``; a worker beside the resources that it was
to take, and a wait for room that does not say for what.
"""

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import yaml

from core.key_files import write_keys
from deploy.api_client import ApiClient, UnreachableError
from tests.deploy.ray_cluster import COMMAND_TIMEOUT_S, LOOPBACK, ROOT, RayCluster, wait_until
from tests.free_ports import free_port
from tests.integration.models import tiny_model

PLAIN, SPECIAL = "127.0.0.5", "127.0.0.6"

pytestmark = [pytest.mark.ray, pytest.mark.ucx, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture
def cluster() -> Iterator[RayCluster]:
    with RayCluster.open({PLAIN: 3}) as cluster:
        cluster.add(SPECIAL, 3, place=1)
        yield cluster


def settings(cluster: RayCluster, model: Path, **deploy: object) -> dict[str, dict[str, object]]:
    return {
        "model": {"model": str(model), "served_name": "model", "device": "cpu"},
        "engine": {"num_threads": 1},
        "cache": {"num_blocks": 256},
        "router": {"port": free_port()},
        "deploy": {"ray_address": cluster.address, **deploy},
    }


def refused(cluster: RayCluster, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command that is to fail."""
    return subprocess.run(
        [sys.executable, "-m", "deploy.main", *arguments],
        env=cluster.environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=COMMAND_TIMEOUT_S,
        check=False,
    )


def follow_until(cluster: RayCluster, file: Path, log: Path, said: str) -> None:
    """Follow a config file until the log says something, and stop."""
    with log.open("w") as out:
        following = subprocess.Popen(
            [sys.executable, "-m", "deploy.main", "workers", "--config", str(file), "--watch"],
            env=cluster.environment,
            cwd=ROOT,
            stdout=out,
            stderr=out,
        )
    wait_until(lambda: said in log.read_text(), said)
    following.send_signal(signal.SIGTERM)
    assert following.wait(60) == 0, log.read_text()


def test_a_detached_deployment_stays_until_down_and_a_full_cluster_says_what_it_lacks(
    cluster: RayCluster, tmp_path: Path
) -> None:
    model = tiny_model("llama", tmp_path / "model")
    file = tmp_path / "config.yaml"
    config = settings(
        cluster, model, name="stays", lifetime="detached", decode_resources={"place": 1}
    )
    file.write_text(yaml.safe_dump(config))

    # When the command has ended, then what it started serves, on the node with the place
    cluster.run("deploy.main", "serve", "--config", str(file))
    client = ApiClient(f"http://{LOOPBACK}:{config['router']['port']}", timeout_s=60)
    hosts = {w.worker_id: urlsplit(w.metrics_address).hostname for w in client.workers()}
    assert hosts.keys() == {"prefill-0", "decode-0"}
    assert hosts["decode-0"] == SPECIAL
    assert client.is_ready()

    # When another one wants that place, then it is told what is asked for and what there is,
    # and nothing of it stays
    other = settings(
        cluster, model, name="waits", decode_resources={"place": 1}, start_timeout_s=15
    )
    file.write_text(yaml.safe_dump(other))
    failed = refused(cluster, "serve", "--config", str(file))
    assert failed.returncode == 1, failed.stderr
    # Beside it is named, on a slow machine, who has had no time to begin.
    full = r"no room for decode-0 \(CPU 1, place 1\).*: the Ray cluster has CPU .*place 0 of 1 free"
    assert re.search(full, " ".join(failed.stderr.split()))
    assert client.is_ready()

    # When one that follows its file wants it, then its log says the same, and it goes on waiting
    other["deploy"] |= {"name": "follows", "lifetime": "detached"}
    other["router"]["control_address"] = "tcp://127.0.0.1:9"
    write_keys(tmp_path / "keys")
    other["security"] = {"keys_dir": str(tmp_path / "keys")}
    file.write_text(yaml.safe_dump(other))
    said = "no room for decode-0 (CPU 1, place 1): the Ray cluster has CPU"
    follow_until(cluster, file, tmp_path / "log", f"event=waits_for_room reason={said}")
    cluster.run("deploy.main", "down", "--name=follows", f"--address={cluster.address}")

    # When a command would have it run by what cannot change, then it is told so, and all goes on
    config["router"]["control_address"] = "tcp://127.0.0.1:9"
    config["security"] = {"keys_dir": str(tmp_path)}
    file.write_text(yaml.safe_dump(config))
    failed = refused(cluster, "workers", "--config", str(file))
    assert failed.returncode == 2, failed.stderr
    assert f"security.keys_dir={tmp_path} (it runs with nothing)" in " ".join(failed.stderr.split())
    wait_until(
        lambda: {w.worker_id for w in client.workers() if w.state == "ready"} == hosts.keys(),
        "both serve on",
    )
    assert client.is_ready()

    # When it is told to go, then nothing is left, and a second time there is nothing to end
    down = ("deploy.main", "down", "--name=stays", f"--address={cluster.address}")
    cluster.run(*down)
    wait_until(lambda: not cluster.living_actors(), "no actor alive")
    with pytest.raises(UnreachableError):
        client.workers()
    with pytest.raises(AssertionError, match="no deployment called 'stays' runs there"):
        cluster.run(*down)
