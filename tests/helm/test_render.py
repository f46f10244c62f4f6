"""What the chart renders hangs together: for every values file that it is tried with."""

import json
from pathlib import Path
from typing import Any

import pytest

from core.config import SluiceConfig
from deploy.config.chart_schema import with_config
from tests.helm.chart import (
    CHART,
    CI_VALUES,
    ROOT,
    Object,
    config_of,
    containers,
    of_kind,
    pods,
    references,
    render,
    selects,
)

EVERY = pytest.mark.parametrize("values", CI_VALUES, ids=lambda path: path.stem)
MADE_ELSEWHERE = {
    "rel-sluice-curve",  # by the job that runs before an install
    "rel-sluice",  # Ray's token, by KubeRay
}


def names_of_volumes(pod: Object) -> set[str]:
    return {volume["name"] for volume in pod["spec"].get("volumes", [])}


@EVERY
def test_the_config_file_is_one(values: Path) -> None:
    objects = render(values)
    config = SluiceConfig.parse(config_of(objects), source=values.name)
    assert config.security.keys_dir is not None
    assert config.deploy.ray_address == "auto"
    assert config.deploy.lifetime == "detached"
    assert config.deploy.upload_code is False, "pods run the code of their own image"
    (cluster,) = of_kind(objects, "RayCluster").values()
    groups = {group["groupName"]: group for group in cluster["spec"]["workerGroupSpecs"]}
    for role, resources in (
        ("prefill", config.deploy.prefill_resources),
        ("decode", config.deploy.decode_resources),
    ):
        assert groups[role]["replicas"] == getattr(config.deploy, role)
        offered = json.loads(json.loads(groups[role]["rayStartParams"]["resources"]))
        assert offered == resources == {f"sluice_{role}": 1}
    services = of_kind(objects, "Service")
    address = f"tcp://rel-sluice-router-control:{config.router.control_port}"
    assert config.router.control_address == address
    control = services["rel-sluice-router-control"]["spec"]
    assert control["clusterIP"] == "None"
    assert control["publishNotReadyAddresses"] is True


@EVERY
def test_no_two_objects_have_one_name(values: Path) -> None:
    keys = [(item["kind"], item["metadata"]["name"]) for item in render(values)]
    assert sorted(set(keys)) == sorted(keys)


@EVERY
def test_each_container_is_locked_down(values: Path) -> None:
    for name, pod in pods(render(values)).items():
        context = pod["spec"]["securityContext"]
        may_be_root = "rdma" in values.stem and name.endswith("/prefill")
        assert context["runAsNonRoot"] is not may_be_root, name
        assert context["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod["spec"]["automountServiceAccountToken"] is name.endswith("-make-keys")
        for container in containers(pod):
            own = container["securityContext"]
            assert own["readOnlyRootFilesystem"] is True
            assert own["allowPrivilegeEscalation"] is False
            added = {"add": ["IPC_LOCK"]} if may_be_root else {}
            assert own["capabilities"] == {"drop": ["ALL"], **added}
            assert container["resources"]["requests"]
            assert container["resources"]["limits"]["memory"]


@EVERY
def test_each_mount_has_its_volume_and_what_is_written_is_a_folder(values: Path) -> None:
    for name, pod in pods(render(values)).items():
        for container in containers(pod):
            mounts = container.get("volumeMounts", [])
            assert {mount["name"] for mount in mounts} <= names_of_volumes(pod), name
            paths = [mount["mountPath"] for mount in mounts]
            assert len(set(paths)) == len(paths)
            assert not any("subPath" in mount for mount in mounts), "it would never change"
            if name.startswith("RayCluster"):
                assert {"/tmp", "/dev/shm", "/home/sluice", "/models"} <= set(paths)  # noqa: S108


@EVERY
def test_each_secret_and_config_map_with_its_key_is_there(values: Path) -> None:
    objects = render(values)
    given = values.read_text()
    for kind, volume in (("ConfigMap", "configMap"), ("Secret", "secret")):
        there = of_kind(objects, kind)
        for pod in pods(objects).values():
            for name, keys in references(pod["spec"], volume):
                if name in MADE_ELSEWHERE or f"name: {name}" in given or name in given:
                    continue
                content = there[name].get("data") or there[name]["stringData"]
                assert set(keys) <= set(content)


@EVERY
def test_each_pod_has_the_secret_key_of_its_own_party_alone(values: Path) -> None:
    owners = {"head": set(), "prefill": {"prefill.key"}, "decode": {"decode.key"}}
    owners |= {"router": {"router.key"}}
    for pod in pods(render(values)).values():
        party = pod["metadata"]["labels"]["app.kubernetes.io/component"]
        for volume in pod["spec"].get("volumes", []):
            if volume["name"] == "keys":
                files = {item["path"] for item in volume["secret"]["items"]}
                public = {"router.pub", "prefill.pub", "decode.pub"}
                assert files == public | owners[party]
                assert volume["secret"]["defaultMode"] == 0o440


@EVERY
def test_each_selector_finds_the_pods_that_it_means(values: Path) -> None:
    objects = render(values)
    labels = {name: pod["metadata"]["labels"] for name, pod in pods(objects).items()}
    for item in objects:
        if item["kind"] not in {"Service", "PodDisruptionBudget", "PodMonitor", "NetworkPolicy"}:
            continue
        selector = item["spec"].get("selector") or item["spec"]["podSelector"]
        found = {name for name, own in labels.items() if selects(selector, own)}
        meant = item["metadata"]["name"].removeprefix("rel-sluice-").removesuffix("-control")
        if meant == "workers":
            assert len(found) == 3
        else:
            assert len(found) == 1, (item["kind"], meant)
            assert meant in found.pop()
    (router,) = of_kind(objects, "Deployment").values()
    own = router["spec"]["template"]["metadata"]["labels"]
    assert selects(router["spec"]["selector"], own)


@EVERY
def test_named_ports_are_there(values: Path) -> None:
    objects = render(values)
    ports = {
        name: {
            port["name"]: port["containerPort"]
            for c in containers(pod)
            for port in c.get("ports", [])
        }
        for name, pod in pods(objects).items()
    }
    labels = {name: pod["metadata"]["labels"] for name, pod in pods(objects).items()}
    for service in of_kind(objects, "Service").values():
        for name, own in labels.items():
            if selects(service["spec"]["selector"], own):
                assert {p["targetPort"] for p in service["spec"]["ports"]} <= set(ports[name])
    for monitor in of_kind(objects, "PodMonitor").values():
        for name, own in labels.items():
            if selects(monitor["spec"]["selector"], own):
                assert {e["port"] for e in monitor["spec"]["podMetricsEndpoints"]} <= set(
                    ports[name]
                )
    for monitor in of_kind(objects, "ServiceMonitor").values():
        (service,) = (
            s
            for s in of_kind(objects, "Service").values()
            if selects(monitor["spec"]["selector"], s["metadata"]["labels"])
        )
        assert {e["port"] for e in monitor["spec"]["endpoints"]} <= {
            p["name"] for p in service["spec"]["ports"]
        }
    metrics_port = SluiceConfig.parse(config_of(objects), source="x").metrics.port
    for role in ("prefill", "decode"):
        assert ports[f"RayCluster/rel-sluice/{role}"]["metrics"] == metrics_port


@EVERY
def test_probes_and_the_way_out(values: Path) -> None:
    objects = render(values)
    config = SluiceConfig.parse(config_of(objects), source="x")
    for role in ("prefill", "decode"):
        pod = pods(objects)[f"RayCluster/rel-sluice/{role}"]
        (worker,) = containers(pod)
        port = str(config.metrics.port)
        for probe, question in (("startup", "live"), ("liveness", "live"), ("readiness", "ready")):
            command = worker[f"{probe}Probe"]["exec"]["command"]
            assert command == ["python", "-m", "deploy.probe", question, "--port", port]
        grace = pod["spec"]["terminationGracePeriodSeconds"]
        drain_s = int(worker["lifecycle"]["preStop"]["exec"]["command"][-1])
        assert config.deploy.drain_timeout_s <= drain_s < grace
        assert config.transfer.lease_s < grace


def test_the_controller_is_a_driver_of_the_heads_ray_node() -> None:
    head = pods(render({}))["RayCluster/rel-sluice/head"]["spec"]
    ray, controller = head["containers"]
    assert ray["name"] == "ray-head", "KubeRay takes the first for Ray's"
    assert head["shareProcessNamespace"] is True, "a driver looks for its raylet's process"
    for path in ("/tmp", "/dev/shm"):  # noqa: S108
        shared = [
            mount["name"]
            for container in (ray, controller)
            for mount in container["volumeMounts"]
            if mount["mountPath"] == path
        ]
        assert len(shared) == 2
        assert len(set(shared)) == 1
    assert "sluice workers --config /etc/sluice/config/config.yaml --watch" in controller["args"][0]


def test_a_network_policy_closes_workers_to_strangers() -> None:
    policies = of_kind(render({}), "NetworkPolicy")
    rules = policies["rel-sluice-workers"]["spec"]["ingress"]
    own = {"app.kubernetes.io/name": "sluice", "app.kubernetes.io/instance": "rel"}
    assert rules[0] == {"from": [{"podSelector": {"matchLabels": own}}]}
    assert [port["port"] for port in rules[1]["ports"]] == [9400]
    assert len(rules) == 2
    assert policies["rel-sluice-workers"]["spec"]["policyTypes"] == ["Ingress"]


def test_prometheus_reads_the_routers_metrics_where_the_api_is_closed() -> None:
    def callers(values: dict[str, Any]) -> list[Object]:
        policy = of_kind(render(values), "NetworkPolicy")["rel-sluice-router"]
        (rule,) = [each for each in policy["spec"]["ingress"] if "ports" in each]
        assert [port["port"] for port in rule["ports"]] == [8000]
        return rule.get("from", [])

    gateway = {"podSelector": {"matchLabels": {"app": "gateway"}}}
    scraper = {"podSelector": {"matchLabels": {"app": "scraper"}}}
    by_default = {
        "namespaceSelector": {},
        "podSelector": {"matchLabels": {"app.kubernetes.io/name": "prometheus"}},
    }
    assert callers({"networkPolicy": {"apiFrom": [gateway]}}) == [gateway, by_default]
    named = {"networkPolicy": {"apiFrom": [gateway], "prometheusFrom": [scraper]}}
    assert callers(named) == [gateway, scraper]
    assert callers({}) == []


def test_egress_is_named_where_it_is_restricted() -> None:
    locked = render(CHART / "ci" / "locked-down-values.yaml")
    for policy in of_kind(locked, "NetworkPolicy").values():
        assert policy["spec"]["policyTypes"] == ["Ingress", "Egress"]
        assert [port["port"] for port in policy["spec"]["egress"][1]["ports"]] == [53, 53]


def test_a_change_of_counts_restarts_no_router_and_reaches_the_controller() -> None:
    def annotations(values: dict[str, Any]) -> dict[str, str]:
        (router,) = of_kind(render(values), "Deployment").values()
        return router["spec"]["template"]["metadata"]["annotations"]

    before, scaled = render({}), {"prefill": {"replicas": 3}}
    assert annotations({}) == annotations(scaled)
    assert annotations({}) != annotations({"config": {"router": {"max_attempts": 2}}})
    # What only supervision goes by restarts no router; a drain's time is the router's too.
    assert annotations({}) == annotations({"config": {"deploy": {"progress_timeout_s": 90}}})
    assert annotations({}) != annotations({"config": {"deploy": {"drain_timeout_s": 90}}})
    assert config_of(before)["deploy"]["prefill"] == 1
    assert config_of(render(scaled))["deploy"]["prefill"] == 3


@pytest.mark.parametrize(
    "values",
    [
        {"model": {"name": "other/model"}},
        {"model": {"servedName": "other"}},
        {"model": {"revision": "other"}},
        {"curve": {"existingSecret": "other"}},
    ],
    ids=str,
)
def test_what_running_pods_cannot_change_is_seen_by_kuberay_and_nothing_else_is(
    values: dict[str, Any],
) -> None:
    def annotations(values: dict[str, Any]) -> dict[str, str]:
        return pods(render(values))["RayCluster/rel-sluice/head"]["metadata"]["annotations"]

    assert annotations(values) != annotations({})
    other = {"decode": {"replicas": 3}, "config": {"engine": {"num_threads": 2}}}
    assert annotations(other) == annotations({})


@pytest.mark.parametrize(
    ("own", "image"),
    [
        ({}, f"sluice@sha256:{'1' * 64}"),
        ({"tag": "2"}, "sluice:2"),
        ({"repository": "other"}, "other:1"),
        ({"digest": f"sha256:{'2' * 64}"}, f"sluice@sha256:{'2' * 64}"),
        ({"pullPolicy": "Always"}, f"sluice@sha256:{'1' * 64}"),
    ],
)
def test_routers_run_the_image_that_was_named_for_them(own: dict[str, str], image: str) -> None:
    common = {"tag": "1", "digest": f"sha256:{'1' * 64}"}
    (router,) = of_kind(render({"image": common, "router": {"image": own}}), "Deployment").values()
    (container,) = router["spec"]["template"]["spec"]["containers"]
    assert container["image"] == image
    assert container["imagePullPolicy"] == own.get("pullPolicy", "IfNotPresent")


def test_a_rollout_of_routers_waits_as_long_as_workers_may_take_to_start() -> None:
    def deadline(values: dict[str, Any]) -> int:
        (router,) = of_kind(render(values), "Deployment").values()
        return router["spec"]["progressDeadlineSeconds"]

    assert deadline({}) == 1800 + 600
    assert deadline({"config": {"deploy": {"start_timeout_s": 60}}}) == 60 + 600


def test_workers_budgets_are_numbers_as_kubernetes_wants_for_owners_that_it_does_not_know() -> None:
    budgets = of_kind(render({"decode": {"replicas": 4}}), "PodDisruptionBudget")
    assert budgets["rel-sluice-decode"]["spec"]["minAvailable"] == 3
    assert budgets["rel-sluice-prefill"]["spec"]["minAvailable"] == 0
    assert budgets["rel-sluice-router"]["spec"]["maxUnavailable"] == 1


def test_dashboards_and_alerts_of_the_chart_are_all_there() -> None:
    objects = render(CHART / "ci" / "tcp-values.yaml")
    dashboards = [m for n, m in of_kind(objects, "ConfigMap").items() if n.endswith("-dashboard")]
    files = sorted((CHART / "dashboards").glob("*.json"))
    assert files
    shown = {name: text for item in dashboards for name, text in item["data"].items()}
    assert {path.name: json.loads(path.read_text()) for path in files} == {
        name: json.loads(text) for name, text in shown.items()
    }
    rules = of_kind(objects, "PrometheusRule")
    assert len(rules) == len(list((CHART / "alerts").glob("*.yaml")))
    for monitor in [
        *of_kind(objects, "PodMonitor").values(),
        *of_kind(objects, "ServiceMonitor").values(),
    ]:
        spec = monitor["spec"]
        (endpoint,) = spec.get("podMetricsEndpoints") or spec["endpoints"]
        # A label of the target renames a metric's own (exported_role): a router's sluice_workers
        # has the role of a worker, by which alerts look for it.
        expected = ["release"] if "endpoints" in spec else ["release", "role"]
        assert [r["targetLabel"] for r in endpoint["relabelings"]] == expected


def test_no_key_is_in_a_config_map() -> None:
    secret = "sk-of-the-test-0123456789"  # noqa: S105
    objects = render({"router": {"apiKeys": [secret]}, "model": {"hfToken": "hf-of-the-test"}})
    for item in objects:
        if item["kind"] != "Secret":
            assert secret not in json.dumps(item)
            assert "hf-of-the-test" not in json.dumps(item)
    assert of_kind(objects, "Secret")["rel-sluice-api-keys"]["stringData"]["keys"] == f"{secret}\n"


def test_extra_objects_are_templates() -> None:
    extra = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "x"},
        "data": {"a": "{{ .Release.Name }}"},
    }
    assert of_kind(render({"extraObjects": [extra]}), "ConfigMap")["x"]["data"] == {"a": "rel"}


def test_a_long_release_name_leaves_room_for_what_kuberay_appends() -> None:
    for item in render({}, name="a" * 53):
        assert len(item["metadata"]["name"]) <= 63
        if item["kind"] == "RayCluster":
            assert len(item["metadata"]["name"]) <= 40


def test_the_schema_of_the_config_is_todays() -> None:
    path = CHART / "values.schema.json"
    written = json.loads(path.read_text())
    fix = "run: make helm-schema"
    assert with_config(written) == written, fix


def test_the_schema_is_closed() -> None:
    def check(node: Any, place: str) -> None:
        if isinstance(node, list):
            for number, part in enumerate(node):
                check(part, f"{place}[{number}]")
        if isinstance(node, dict):
            if "properties" in node and "allOf" not in place:
                assert node.get("additionalProperties") is False, place
            for key, part in node.items():
                check(part, f"{place}.{key}")

    check(json.loads((CHART / "values.schema.json").read_text()), "")


def test_the_chart_has_the_versions_of_the_code() -> None:
    from core.version import VERSION  # noqa: PLC0415

    assert f'appVersion: "{VERSION}"' in (CHART / "Chart.yaml").read_text()
    lock = (ROOT / "requirements" / "cpu.lock").read_text()
    ray = next(
        line.split("==")[1].split()[0] for line in lock.splitlines() if line.startswith("ray==")
    )
    assert f'version: "{ray}"' in (CHART / "values.yaml").read_text()
