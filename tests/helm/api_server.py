"""A real kube-apiserver with etcd, without nodes: what is installed there stays Pending."""

import json
import os
import secrets
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from ssl import CERT_NONE, create_default_context
from typing import Any

import pytest
import yaml

from tests.free_ports import free_port
from tests.helm.chart import TOOLS, tool

START_TIMEOUT_S = 150.0


@dataclass(frozen=True, slots=True)
class ApiServer:
    """Where it is, and how to be its administrator."""

    url: str
    token: str
    ca: Path
    kubeconfig: Path

    def run(self, *command: str | Path, stdin: str | None = None) -> str:
        """Run helm or kubectl against it and return what it printed."""
        result = subprocess.run(
            [tool(str(command[0])), *map(str, command[1:])],
            env={**os.environ, "KUBECONFIG": str(self.kubeconfig)},
            input=stdin,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert result.returncode == 0, result.stderr
        return result.stdout

    def get(self, *what: str) -> Any:
        """Return objects, as kubectl gets them."""
        return json.loads(self.run("kubectl", "get", *what, "-o", "json"))


def crd_folder() -> Path:
    """Return the folder with KubeRay's and the Prometheus operator's CRDs, or skip the test."""
    folder = Path(os.environ.get("SLUICE_CRDS") or TOOLS / "crds")
    if not list(folder.glob("ray.io_rayclusters.yaml")):
        pytest.skip(f"no CRDs in {folder}: copy those of KubeRay and the Prometheus operator there")
    return folder


@contextmanager
def api_server(folder: Path) -> Generator[ApiServer]:
    """Run one in ``folder``; skip the test where its programs are missing."""
    for program in ("etcd", "openssl"):
        tool(program)
    token = secrets.token_hex(16)
    peer, client, port = (free_port() for _ in range(3))
    pki = folder / "pki"
    pki.mkdir()
    (pki / "tokens.csv").write_text(f"{token},admin,admin,system:masters\n")
    subprocess.run(
        ["openssl", "genrsa", "-out", pki / "sa.key", "2048"], check=True, capture_output=True
    )
    with ExitStack() as running:
        etcd = [
            "etcd",
            "--data-dir",
            folder / "etcd",
            "--listen-peer-urls",
            f"http://127.0.0.1:{peer}",
        ]
        for flag in ("--listen-client-urls", "--advertise-client-urls"):
            etcd += [flag, f"http://127.0.0.1:{client}"]
        etcd += ["--initial-advertise-peer-urls", f"http://127.0.0.1:{peer}"]
        etcd += ["--initial-cluster", f"default=http://127.0.0.1:{peer}"]
        _start(running, etcd, folder / "etcd.log")
        server = [
            tool("kube-apiserver"), f"--etcd-servers=http://127.0.0.1:{client}",
            "--bind-address=127.0.0.1", "--advertise-address=127.0.0.1", f"--secure-port={port}",
            f"--cert-dir={pki}", "--service-cluster-ip-range=10.96.0.0/16",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={pki / 'sa.key'}",
            f"--service-account-signing-key-file={pki / 'sa.key'}",
            f"--token-auth-file={pki / 'tokens.csv'}", "--authorization-mode=RBAC",
            "--disable-admission-plugins=ServiceAccount",
        ]  # fmt: skip
        _start(running, server, folder / "apiserver.log")
        url = f"https://127.0.0.1:{port}"
        kubeconfig = folder / "kubeconfig"
        kubeconfig.write_text(yaml.safe_dump(_kubeconfig(url, token)))
        _wait_ready(url, token, folder / "apiserver.log")
        yield ApiServer(url, token, pki / "apiserver.crt", kubeconfig)


def install_crds(server: ApiServer, crds: Path, folder: Path) -> None:
    """Load the CRDs, without what a server of 1.20 cannot take."""
    for path in crds.glob("*.yaml"):
        content = yaml.load(path.read_text(), yaml.CSafeLoader)
        target = folder / f"{path.stem}.json"
        target.write_text(json.dumps(_for_old_servers(content)))
        server.run("kubectl", "create", "-f", target)
    deadline = time.monotonic() + START_TIMEOUT_S
    # Not by `kubectl wait`, which fails on a kind that has no conditions yet.
    while not all(_is_established(kind) for kind in server.get("crd")["items"]):
        assert time.monotonic() < deadline, "the server does not serve the kinds"
        time.sleep(0.2)


def _is_established(kind: dict[str, Any]) -> bool:
    conditions = kind.get("status", {}).get("conditions") or []
    return any(each["type"] == "Established" and each["status"] == "True" for each in conditions)


def _start(running: ExitStack, command: list[Any], log: Path) -> None:
    file = running.enter_context(log.open("w"))
    process = subprocess.Popen(list(map(str, command)), stdout=file, stderr=file)
    running.callback(process.wait, 30)
    running.callback(process.terminate)


def _wait_ready(url: str, token: str, log: Path) -> None:
    context = create_default_context()
    context.check_hostname = False
    context.verify_mode = CERT_NONE
    headers = {"Authorization": f"Bearer {token}"}
    request = urllib.request.Request(f"{url}/readyz", headers=headers)  # noqa: S310
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        try:
            urllib.request.urlopen(request, timeout=5, context=context).close()  # noqa: S310
        except OSError:
            assert time.monotonic() < deadline, log.read_text()[-2000:]
            time.sleep(0.2)
        else:
            return


def _kubeconfig(url: str, token: str) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "c", "cluster": {"server": url, "insecure-skip-tls-verify": True}}],
        "users": [{"name": "u", "user": {"token": token}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "x",
    }


def _for_old_servers(node: Any) -> Any:
    """Drop CEL rules, selectable fields, empty defaults, and keys of lists that may be absent."""
    if isinstance(node, list):
        return [_for_old_servers(part) for part in node]
    if not isinstance(node, dict):
        return node
    dropped = {"x-kubernetes-validations", "selectableFields"}
    kept = {
        key: _for_old_servers(value)
        for key, value in node.items()
        if key not in dropped and not (key == "default" and value == "")
    }
    keys = kept.get("x-kubernetes-list-map-keys")
    if isinstance(keys, list):
        items = kept.get("items", {})
        if any(
            key not in items.get("required", [])
            and "default" not in items.get("properties", {}).get(key, {})
            for key in keys
        ):
            del kept["x-kubernetes-list-map-keys"], kept["x-kubernetes-list-type"]
    return kept


def chart_for_old_servers(chart: Path, folder: Path) -> Path:
    """Copy the chart and let it be installed on the server's old version."""
    copy = Path(shutil.copytree(chart, folder / "sluice"))
    path = copy / "Chart.yaml"
    path.write_text(path.read_text().replace(">=1.27.0-0", ">=1.20.0-0"))
    return copy
