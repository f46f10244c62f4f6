"""The systems that are compared: how each is started, asked and stopped."""

import json
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench import peers

SERVED_NAME = "bench"
_ROOT = Path(__file__).parents[1]
_PROXY = _ROOT / "bench" / "vllm_proxy.py"
_PAUSING_THREAD = _ROOT / "bench" / "nixl_pausing_thread"

_VLLM_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}


@dataclass(frozen=True, slots=True)
class Server:
    """One command of a system, and the URL that answers 200 when it is ready."""

    name: str
    command: Sequence[str]
    ready_url: str
    environment: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True, slots=True)
class ServedSystem:
    """A system with an OpenAI API: its servers, started in order, the last one answers."""

    name: str
    url: str
    servers: tuple[Server, ...]
    start_timeout_s: float


def free_port() -> int:
    """Return a port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def sluice(
    name: str,
    model: Path,
    work: Path,
    *,
    prefill: int,
    sections: Mapping[str, Mapping[str, object]] | None = None,
) -> ServedSystem:
    """Return this repository's deployment with ``prefill`` prefill workers and one decode worker.

    ``work`` receives its config file, with ``sections`` beside the model's.
    """
    config = work / f"{name}.yaml"
    section = {"model": str(model), "served_name": SERVED_NAME, "dtype": "bfloat16"}
    content = {"model": section, **(sections or {})}
    config.write_text(json.dumps(content), encoding="utf-8")  # JSON is YAML
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "deploy.main", "serve", "--config", str(config)]
    command += ["--prefill", str(prefill), "--decode", "1", "--port", str(port)]
    return ServedSystem(name, url, (Server("serve", command, f"{url}/ready"),), 300.0)


def vllm(model: Path) -> ServedSystem:
    """Return vLLM's CPU build as shipped: one colocated engine on all cores."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    server = Server("vllm", _vllm_command(model, port), f"{url}/health", _VLLM_ENVIRONMENT)
    return ServedSystem("vllm", url, (server,), 600.0)


def vllm_1p1d(model: Path, *, cores: Sequence[int]) -> ServedSystem:
    """Return two vLLM engines joined by its NixlConnector, half of ``cores`` each.

    NIXL's progress thread pauses between its rounds. As shipped it spins, and where engines share
    cores that costs more than the model does.
    """
    half = max(1, len(cores) // 2)
    prefill = _vllm_half("prefill", "kv_producer", model, cores[:half])
    decode = _vllm_half("decode", "kv_consumer", model, cores[half:] or cores)
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    proxy = Server(
        "proxy",
        [sys.executable, str(_PROXY), str(port), _origin(prefill), _origin(decode)],
        f"{url}/health",
    )
    return ServedSystem("vllm-1p1d", url, (prefill, decode, proxy), 900.0)


def _vllm_half(name: str, role: str, model: Path, cores: Sequence[int]) -> Server:
    port = free_port()
    command = _vllm_command(model, port)
    transfer = {
        "kv_connector": "NixlConnector",
        "kv_role": role,
        "kv_buffer_device": "cpu",
        "kv_connector_extra_config": {"num_threads": 0},
    }
    command += ["--kv-transfer-config", json.dumps(transfer)]
    environment = {
        **_VLLM_ENVIRONMENT,
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(str(core) for core in cores),
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
        "PYTHONPATH": str(_PAUSING_THREAD),
    }
    return Server(name, command, f"http://127.0.0.1:{port}/health", environment)


def _origin(server: Server) -> str:
    return server.ready_url.removesuffix("/health")


def _vllm_command(model: Path, port: int) -> list[str]:
    command = [str(peers.vllm_python()), "-m", "vllm.entrypoints.cli.main", "serve", str(model)]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    return [*command, "--dtype", "bfloat16", "--served-model-name", SERVED_NAME]
