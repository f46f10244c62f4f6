"""The exec probe of a worker's pod, against real sockets."""

import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from prometheus_client import CollectorRegistry

from core.metrics import MetricsServer
from deploy import probe
from tests.free_ports import refused_port


@contextmanager
def listening(reasons: dict[str, str | None]) -> Iterator[int]:
    """Answer each path with its reason, or 200."""
    checks = {path: (lambda reason=reason: reason) for path, reason in reasons.items()}
    server = MetricsServer(CollectorRegistry(), host="127.0.0.1", checks=checks)
    try:
        yield int(server.address.rpartition(":")[2].partition("/")[0])
    finally:
        server.close()


@contextmanager
def frozen() -> Iterator[int]:
    """Accept, as the kernel does for a stopped process, and say nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def run(kind: str, port: int, raylet_port: int, *, timeout_s: float = 60.0) -> int:
    ports = ["--port", str(port), "--raylet-port", str(raylet_port)]
    return probe.main([kind, *ports, "--timeout", str(timeout_s)])


def test_live_is_raylet_and_worker_and_a_pod_without_a_worker_yet(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with listening({"/api/healthz": None}) as raylet, refused_port() as nobody:
        assert run("live", nobody, raylet) == 0
        with listening({"/livez": None}) as worker:
            assert run("live", worker, raylet) == 0
            assert run("live", worker, nobody) == 1
        capsys.readouterr()
        with listening({"/livez": "no progress for 61 s"}) as worker:
            assert run("live", worker, raylet) == 1
        assert "no progress for 61 s" in capsys.readouterr().out
        with frozen() as worker:
            assert run("live", worker, raylet, timeout_s=0.5) == 1


def test_ready_needs_a_worker_that_says_so() -> None:
    with refused_port() as nobody:
        assert run("ready", nobody, 1) == 1
    with listening({"/readyz": None}) as worker:
        assert run("ready", worker, 1) == 0
    with listening({"/readyz": "draining"}) as worker:
        assert run("ready", worker, 1) == 1
    with frozen() as worker:
        assert run("ready", worker, 1, timeout_s=0.5) == 1


def test_the_probe_loads_neither_torch_nor_ray_nor_our_other_packages() -> None:
    code = (
        "import sys, deploy.probe; "
        "print([n for n in ('torch', 'ray', 'zmq', 'pydantic', 'router') if n in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"
