"""The scripts that pods run, against a real deployment on a real Ray node."""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Generator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from deploy.default_model import DEFAULT_MODEL_NAME
from deploy.model_source import cache_folder
from tests.free_ports import free_port
from tests.helm.chart import CHART, ROOT

BIN = Path(sys.executable).parent
START_TIMEOUT_S = 180.0
DRAIN_S = 60

pytestmark = [
    pytest.mark.ray,
    pytest.mark.ucx,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        not (cache_folder() / "models" / DEFAULT_MODEL_NAME).is_dir(),
        reason="the default model is not in the cache; run: sluice fetch",
    ),
]


@dataclass(frozen=True, slots=True)
class Node:
    """A Ray node with one worker of each kind, and where the API is."""

    environment: dict[str, str]
    url: str
    log: Path

    def run(self, script: str, *arguments: str, **environment: str) -> str:
        """Run one of the chart's scripts as a pod does, and return what it printed."""
        result = subprocess.run(
            [sys.executable, CHART / "files" / script, *arguments],
            env=self.environment | environment,
            capture_output=True,
            text=True,
            timeout=DRAIN_S + 60,
            check=False,
        )
        assert result.returncode == 0, result.stdout + result.stderr + self.log.read_text()[-2000:]
        return result.stdout

    def written(self) -> str:
        """Return what the actors have logged: a node that is empty ends before all is passed on."""
        logs = self.log.parent.glob("t/session_latest/logs/worker-*.err")
        return "".join(log.read_text() for log in sorted(logs))


@pytest.fixture
def node() -> Generator[Node]:
    with tempfile.TemporaryDirectory(prefix="slh-", dir="/tmp", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        gcs, port = free_port(), free_port()
        environment = os.environ | {
            "PATH": f"{BIN}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "RAY_ADDRESS": f"{socket.gethostbyname(socket.gethostname())}:{gcs}",
            "RAY_AUTH_MODE": "disabled",
            "RAY_USAGE_STATS_ENABLED": "0",
        }
        head = [BIN / "ray", "start", "--head", "--block", "--num-cpus", "3", "--port", str(gcs)]
        head += ["--include-dashboard", "false", "--temp-dir", folder / "t"]
        for other in ("ray-client-server-port", "dashboard-agent-listen-port"):
            head += [f"--{other}", str(free_port())]  # by itself Ray takes the same on all clusters
        serve = [sys.executable, "-m", "deploy.main", "serve", "--port", str(port)]
        serve += ["--set", "engine.num_threads=1"]
        started: list[subprocess.Popen[bytes]] = []
        log = folder / "log"
        try:
            with log.open("w") as file:
                own = environment.copy()
                del own["RAY_ADDRESS"]
                started.append(subprocess.Popen(head, env=own, stdout=file, stderr=file))
                _wait_open(gcs)
                started.append(
                    subprocess.Popen(serve, env=environment, stdout=file, stderr=file, cwd=ROOT)
                )
                url = f"http://127.0.0.1:{port}"
                _wait_ready(url, log)
                yield Node(environment, url, log)
        finally:
            for process in reversed(started):
                _end(process)


def _wait_open(port: int) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        assert time.monotonic() < deadline
        time.sleep(0.2)


def _wait_ready(url: str, log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        with suppress(OSError), urllib.request.urlopen(f"{url}/readyz", timeout=5) as answer:  # noqa: S310
            if json.load(answer)["prefill"]:
                return
        assert time.monotonic() < deadline, log.read_text()[-3000:]
        time.sleep(0.5)


def _end(process: subprocess.Popen[bytes]) -> None:
    below = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGTERM)
    _, alive = psutil.wait_procs([process, *below], timeout=20)
    for left in alive:
        with suppress(psutil.NoSuchProcess):
            left.kill()
    process.wait()


def test_the_chart_tests_generate_and_a_pod_that_ends_is_emptied_first(node: Node) -> None:
    told = node.run("generate.py", SLUICE_URL=node.url, TIMEOUT_S="60")
    assert "'path': 'disaggregated'" in told
    assert "the metrics have counted it" in told

    node.run("drain_node.py", str(DRAIN_S))
    ended = [f"event=over service={name}" for name in ("prefill-0", "decode-0")]
    deadline = time.monotonic() + DRAIN_S
    while not all(line in node.written() for line in ended):
        assert time.monotonic() < deadline, node.written()
        time.sleep(0.2)
    assert "event=crashed" not in node.written()


def test_a_generation_by_another_path_fails_the_chart_test(node: Node) -> None:
    with pytest.raises(AssertionError, match="went by 'disaggregated', not 'local'"):
        node.run("generate.py", SLUICE_URL=node.url, TIMEOUT_S="60", EXPECTED_PATH="local")
