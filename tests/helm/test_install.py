"""Install, upgrade, roll back, uninstall on a real API server."""

import base64
import os
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
import yaml

from core.key_files import load_keys
from tests.helm.api_server import (
    ApiServer,
    api_server,
    chart_for_old_servers,
    crd_folder,
    install_crds,
)
from tests.helm.chart import CHART, ROOT, helm

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
OLD_SERVER = {"pdb": {"enabled": False}}
"""The server that can be built is too old for policy/v1; its schema is checked in test_kinds.py."""
VALUES: dict[str, Any] = dict.fromkeys(("router", "prefill", "decode"), OLD_SERVER)
RAY = "rayclusters.ray.io"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Generator[ApiServer]:
    helm("version")
    crds, folder = crd_folder(), tmp_path_factory.mktemp("kube")
    with api_server(folder) as started:
        install_crds(started, crds, folder)
        yield started


@pytest.fixture(scope="module")
def bare_server(tmp_path_factory: pytest.TempPathFactory) -> Generator[ApiServer]:
    helm("version")
    with api_server(tmp_path_factory.mktemp("bare")) as started:
        yield started


@pytest.fixture
def chart(tmp_path: Path) -> Path:
    return chart_for_old_servers(CHART, tmp_path)


def values(**changes: Any) -> str:
    return yaml.safe_dump({**VALUES, **changes})


def counts(server: ApiServer, namespace: str) -> dict[str, int]:
    (cluster,) = server.get(RAY, "-n", namespace)["items"]
    groups = cluster["spec"]["workerGroupSpecs"]
    return {group["groupName"]: group["replicas"] for group in groups}


def config(server: ApiServer, namespace: str) -> dict[str, Any]:
    content = server.get("configmap", "llm-sluice", "-n", namespace)["data"]["config.yaml"]
    return yaml.safe_load(content)


def make_keys(server: ApiServer, namespace: str, account: Path) -> str:
    """Do what the job before an install does, with its script: there are no nodes to run it."""
    account.mkdir(exist_ok=True)
    (account / "token").write_text(server.token)
    (account / "ca.crt").write_bytes(server.ca.read_bytes())
    result = subprocess.run(
        [sys.executable, CHART / "files" / "make_keys.py"],
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "ACCOUNT_DIR": str(account),
            "SECRET_NAME": "llm-sluice-curve",
            "NAMESPACE": namespace,
            "API_SERVER": server.url,
        },
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_install_upgrade_rollback_uninstall(server: ApiServer, chart: Path) -> None:
    release = ("llm", chart, "-n", "serving", "--no-hooks", "-f", "-")
    server.run("helm", "install", *release, "--create-namespace", stdin=values())
    assert counts(server, "serving") == {"prefill": 1, "decode": 1}
    before = server.get("deployment", "llm-sluice-router", "-n", "serving")

    scaled = values(prefill={**OLD_SERVER, "replicas": 3})
    server.run("helm", "upgrade", *release, stdin=scaled)
    assert counts(server, "serving") == {"prefill": 3, "decode": 1}
    assert config(server, "serving")["deploy"]["prefill"] == 3
    after = server.get("deployment", "llm-sluice-router", "-n", "serving")
    assert after["spec"]["template"] == before["spec"]["template"], "no router restarts for it"

    server.run("helm", "rollback", "llm", "1", "-n", "serving", "--no-hooks")
    assert counts(server, "serving") == {"prefill": 1, "decode": 1}
    assert config(server, "serving")["deploy"]["prefill"] == 1

    server.run("helm", "uninstall", "llm", "-n", "serving", "--no-hooks")
    kinds = f"{RAY},deployments,services,configmaps,networkpolicies,serviceaccounts"
    left = [
        item["metadata"]["name"]
        for item in server.get(kinds, "-n", "serving")["items"]
        if item["metadata"]["name"].startswith("llm")
    ]
    assert left == []


def test_what_a_running_release_cannot_change_is_refused_unless_all_may_end(
    server: ApiServer, chart: Path
) -> None:
    release = ("llm", chart, "-n", "fixed", "--no-hooks", "-f", "-")
    server.run("helm", "install", *release, "--create-namespace", stdin=values())
    for change, said in (
        ({"model": {"name": "b/c"}}, 'model.name: the release runs with "default"'),
        ({"model": {"servedName": "b"}}, "model.servedName: the release runs with"),
        ({"curve": {"existingSecret": "b"}}, "curve.existingSecret: the release runs with"),
    ):
        with pytest.raises(AssertionError, match=said):
            server.run("helm", "upgrade", *release, stdin=values(**change))
    assert config(server, "fixed")["model"]["model"] == "default"

    anew = values(model={"name": "b/c"}, ray={"upgradeStrategy": "Recreate"})
    server.run("helm", "upgrade", *release, stdin=anew)
    assert config(server, "fixed")["model"]["model"] == "b/c"


def test_who_may_do_all_in_one_namespace_and_nothing_elsewhere_can_install_there(
    server: ApiServer, chart: Path
) -> None:
    server.run("kubectl", "create", "namespace", "owned")
    rights = ("--verb=*", "--resource=*.*", "-n", "owned")
    server.run("kubectl", "create", "role", "owner", *rights)
    server.run("kubectl", "create", "rolebinding", "owner", "--role=owner", "--user=o", *rights[2:])
    release = ("llm", chart, "-n", "owned", "--no-hooks", "-f", "-", "--kube-as-user", "o")
    server.run("helm", "install", *release, stdin=values())
    server.run("helm", "upgrade", *release, stdin=values())
    assert counts(server, "owned") == {"prefill": 1, "decode": 1}


@pytest.mark.parametrize("path", sorted((CHART / "ci").glob("*.yaml")), ids=lambda p: p.stem)
def test_the_server_takes_every_object(server: ApiServer, chart: Path, path: Path) -> None:
    given = yaml.safe_load(path.read_text())
    for role in ("router", "prefill", "decode"):
        given[role] = {**given.get(role, {}), **OLD_SERVER}
    given["router"].pop("autoscaling", None)
    given.pop("httpRoute", None)
    server.run(
        "helm", "install", "dry", chart, "-f", "-", "--dry-run=server", stdin=yaml.safe_dump(given)
    )


def test_keys_are_made_once(server: ApiServer, tmp_path: Path) -> None:
    server.run("kubectl", "create", "namespace", "keys")
    assert "created" in make_keys(server, "keys", tmp_path / "account")
    first = server.get("secret", "llm-sluice-curve", "-n", "keys")["data"]
    assert "stays as it is" in make_keys(server, "keys", tmp_path / "account")
    assert server.get("secret", "llm-sluice-curve", "-n", "keys")["data"] == first
    folder = tmp_path / "keys"
    folder.mkdir(mode=0o700)
    for name, text in first.items():
        (folder / name).write_bytes(base64.b64decode(text))
        (folder / name).chmod(0o600)
    for party in ("router", "prefill", "decode"):
        load_keys(folder, party)


def test_the_job_that_makes_keys_may_create_secrets_and_do_nothing_else(
    server: ApiServer, chart: Path
) -> None:
    objects = yaml.safe_load_all(server.run("helm", "template", "llm", chart, "-n", "default"))
    meant = [
        item
        for item in objects
        if item and item["kind"] in {"Role", "RoleBinding", "ServiceAccount"}
        if item["metadata"]["name"].endswith("make-keys")
    ]
    assert len(meant) == 3
    server.run("kubectl", "apply", "-n", "default", "-f", "-", stdin=yaml.safe_dump_all(meant))
    review = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SubjectAccessReview",
        "spec": {"user": "system:serviceaccount:default:llm-sluice-make-keys"},
    }

    def may(verb: str, resource: str, namespace: str = "default") -> bool:
        attributes = {"namespace": namespace, "verb": verb, "resource": resource}
        asked = {**review, "spec": {**review["spec"], "resourceAttributes": attributes}}  # type: ignore[dict-item]
        text = server.run("kubectl", "create", "-f", "-", "-o", "yaml", stdin=yaml.safe_dump(asked))
        return yaml.safe_load(text)["status"]["allowed"]

    assert may("create", "secrets")
    assert not may("get", "secrets")
    assert not may("list", "secrets")
    assert not may("delete", "secrets")
    assert not may("create", "pods")
    assert not may("create", "secrets", "kube-system")


def test_a_cluster_without_kuberay_is_told_so(bare_server: ApiServer, chart: Path) -> None:
    with pytest.raises(AssertionError, match="install the KubeRay operator first"):
        bare_server.run("helm", "install", "llm", chart, "--no-hooks", "-f", "-", stdin=values())
