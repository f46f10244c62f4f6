"""What the chart gives a router pod, its config and its part of the keys, starts a router."""

import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml

from core.key_files import write_keys
from deploy.default_model import DEFAULT_MODEL_NAME
from deploy.model_source import cache_folder
from tests.free_ports import free_port
from tests.helm.chart import ROOT, Object, config_of, containers, of_kind, pods, render

START_TIMEOUT_S = 100.0

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        not (cache_folder() / "models" / DEFAULT_MODEL_NAME).is_dir(),
        reason="the default model is not in the cache; run: sluice fetch",
    ),
]


def status(url: str) -> int | None:
    """Return the status of an answer; None: nobody listens."""
    try:
        with urllib.request.urlopen(url, timeout=30) as answer:  # noqa: S310
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return None


def mounted_keys(pod: Object, folder: Path) -> Path:
    """Make the folder of keys that a pod sees: of a whole set, what its volume names."""
    (volume,) = (volume for volume in pod["spec"]["volumes"] if volume["name"] == "keys")
    mounted = {item["path"] for item in volume["secret"]["items"]}
    for path in write_keys(folder):
        if path.name not in mounted:
            path.unlink()
    return folder


def local_config(objects: list[Object], folder: Path) -> Object:
    """Return the chart's config with folders and ports of this machine."""
    config = config_of(objects)
    api_keys = folder / "api-keys"
    api_keys.write_text(of_kind(objects, "Secret")["rel-sluice-api-keys"]["stringData"]["keys"])
    api_keys.chmod(0o600)
    port, control = free_port(), free_port()
    pod = pods(objects)["Deployment/rel-sluice-router"]
    keys = mounted_keys(pod, folder / "keys")
    config["security"] = {"keys_dir": str(keys), "api_keys_file": str(api_keys)}
    config["router"] |= {"port": port, "control_port": control}
    config["router"]["control_address"] = f"tcp://127.0.0.1:{control}"
    return config


@contextmanager
def running(command: list[str], log: Path) -> Generator[subprocess.Popen[bytes]]:
    environment = os.environ | {"RAY_ADDRESS": ""}
    with log.open("w") as file:
        process = subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=file, env=environment)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def test_a_router_lives_without_workers_and_asks_for_the_key(tmp_path: Path) -> None:
    objects = render({"router": {"apiKeys": ["sk-of-the-test-0123456789"]}})
    (container,) = containers(pods(objects)["Deployment/rel-sluice-router"])
    assert container["args"][:2] == ["sluice", "router"]
    config = local_config(objects, tmp_path)
    path, log = tmp_path / "config.yaml", tmp_path / "log"
    path.write_text(yaml.safe_dump(config))
    command = [sys.executable, "-m", "deploy.main", *container["args"][1:-1], str(path)]
    url = f"http://127.0.0.1:{config['router']['port']}"
    live, ready = (
        url + container[f"{name}Probe"]["httpGet"]["path"] for name in ("liveness", "readiness")
    )
    with running(command, log) as process:
        deadline = time.monotonic() + START_TIMEOUT_S
        while status(live) is None:
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.2)
        assert status(live) == 200
        assert status(ready) == 503
        assert status(url + "/metrics") == 200
        assert status(url + "/v1/models") == 401
        process.send_signal(signal.SIGTERM)
        assert process.wait(START_TIMEOUT_S) == 0, log.read_text()
