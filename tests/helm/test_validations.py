"""What installs well and serves badly is refused, with the value and the fix."""

from typing import Any

import pytest
import yaml

from core.config import DeployConfig
from deploy.supervision.changes import EFFECTS, Effect
from tests.helm.chart import CHART, helm, of_kind, refusal, render

RDMA = {"enabled": True}
REFUSED: list[tuple[dict[str, Any], str]] = [
    (
        {"config": {"deploy": {"prefill": 2}}},
        "config.deploy.prefill: the chart sets it; remove it, and see the value prefill.replicas",
    ),
    ({"config": {"deploy": {"upload_code": True}}}, "remove it, and see the value image"),
    ({"config": {"deploy": {"name": "b"}}}, "config.deploy.name: the chart sets it"),
    ({"config": {"router": {"port": 1}}}, "config.router.port: the chart sets it"),
    ({"config": {"security": {"keys_dir": "/x"}}}, "see the value curve.existingSecret"),
    ({"prefill": {"metricsPort": 9500}}, "prefill.metricsPort=9500, decode.metricsPort=9400"),
    ({"router": {"controlPort": 8000}}, "router.controlPort=8000 is router.port too"),
    (
        {"router": {"apiKeys": ["0123456789abcdef"], "apiKeysSecret": {"name": "b"}}},
        "keys come from one place",
    ),
    ({"model": {"hfToken": "a", "hfTokenSecret": {"name": "b"}}}, "the token comes from one place"),
    ({"model": {"pvc": {"create": True, "existingClaim": "x"}}}, 'model.pvc.existingClaim="x"'),
    ({"model": {"pvc": {"readOnly": True}}}, "name an existingClaim that holds it"),
    ({"model": {"name": "/data/m"}}, "give a folder below it"),
    ({"model": {"name": "/models/m"}}, "set model.pvc.existingClaim"),
    ({"router": {"terminationGracePeriodSeconds": 100}}, "a pod needs 135 s"),
    (
        {"decode": {"terminationGracePeriodSeconds": 129}},
        "must be config.deploy.drain_timeout_s (120) + 10",
    ),
    ({"config": {"transfer": {"lease_s": 180}}}, "must be more than transfer.lease_s (180)"),
    (
        {"prefill": {"replicas": 3, "maxReplicas": 2}},
        "prefill.maxReplicas=2 is less than prefill.replicas=3",
    ),
    (
        {"prefill": {"rdma": RDMA}},
        'prefill.rdma.memlock: say how memory may be locked, "root" or "node"',
    ),
    (
        {"config": {"router": {"drain_delay_s": 120}}},
        "config.router.drain_delay_s=120: leaves no time",
    ),
    (
        {
            "prefill": {
                "rdma": {**RDMA, "memlock": "root"},
                "podSecurityContext": {"runAsUser": 1000},
            }
        },
        "prefill.podSecurityContext.runAsUser=1000: rdma.memlock is",
    ),
    ({"decode": {"hostNetwork": True}}, "set networkPolicy.enabled=false"),
    (
        {"decode": {"hostNetwork": True, "replicas": 2}, "networkPolicy": {"enabled": False}},
        "one node takes one worker",
    ),
    ({"decode": {"gpu": {"count": 1}, "ucx": {"tls": "rc,tcp"}}}, "add cuda_copy,cuda_ipc"),
    ({"decode": {"gpu": {"count": 2}}}, "decode.gpu.count=2, engine.tensor_parallel_size=1"),
    (
        {"config": {"engine": {"num_threads": 8}}},
        "resources: cpu 4 is less than the 8 that a worker takes",
    ),
    (
        {
            "config": {"decode": {"engine": {"num_threads": 2}}},
            "decode": {"resources": {"requests": {"cpu": "500m"}}},
        },
        "decode.resources: cpu 500m is less than the 2 that a worker takes",
    ),
    (
        {"networkPolicy": {"restrictEgress": True}},
        'no pod could fetch model.name="default"; allow it by networkPolicy.extraEgress',
    ),
    ({"prefill": {"replicas": 0, "gpu": {"count": 1}}}, "set decode.gpu.count"),
    (
        {"router": {"autoscaling": {"enabled": True, "minReplicas": 9}}},
        "router.autoscaling.maxReplicas=8 is less than minReplicas=9",
    ),
    (
        {"router": {"autoscaling": {"enabled": True}, "resources": {"requests": {"cpu": None}}}},
        "needs router.resources.requests.cpu",
    ),
    ({"httpRoute": {"enabled": True}}, "httpRoute.enabled needs httpRoute.parentRefs"),
]
UNKNOWN: list[tuple[dict[str, Any], str]] = [
    ({"router": {"apiKeys": ["short"]}}, "/router/apiKeys/0"),
    ({"replicaCount": 2}, "'replicaCount' not allowed"),
    ({"prefill": {"replica": 2}}, "'replica' not allowed"),
    ({"router": {"probes": {"liveness": {"period": 2}}}}, "'period' not allowed"),
    ({"config": {"cache": {"blocksize": 2}}}, "'blocksize' not allowed"),
    ({"config": {"prefill": {"router": {}}}}, "invalid propertyName 'router'"),
    ({"decode": {"replicas": 0}}, "/decode/replicas"),
    ({"decode": {"rdma": {"memlock": "yes"}}}, "/decode/rdma/memlock"),
    ({"image": {"digest": "latest"}}, "/image/digest"),
    ({"prefill": {"ucx": {"env": {"PATH": "x"}}}}, "/prefill/ucx/env"),
]


@pytest.mark.parametrize(("values", "message"), REFUSED, ids=lambda part: str(part)[:60])
def test_refused_with_the_value_and_the_fix(values: dict[str, Any], message: str) -> None:
    assert message in refusal(values)


@pytest.mark.parametrize(
    "field", [name for name, effect in EFFECTS.items() if effect is Effect.REFUSED]
)
def test_what_no_running_deployment_can_change_is_the_charts_alone(field: str) -> None:
    value = getattr(DeployConfig(), field) or "x"
    assert f"config.deploy.{field}: the chart sets it" in refusal(
        {"config": {"deploy": {field: value}}}
    )


def test_every_field_that_the_chart_sets_is_refused_in_the_config() -> None:
    named = {"model": {"servedName": "m", "revision": "r"}, "router": {"apiKeys": ["k" * 16]}}
    config = yaml.safe_load(
        of_kind(render(named), "ConfigMap")["rel-sluice"]["data"]["config.yaml"]
    )
    given = yaml.safe_load((CHART / "values.yaml").read_text())["config"]
    fields = [
        (section, field, value)
        for section, values in config.items()
        if isinstance(values, dict)
        for field, value in values.items()
        if field not in given.get(section, {})
    ]
    assert len(fields) > len(EFFECTS) / 2, "the chart sets hardly anything"
    for section, field, value in fields:
        told = refusal({"config": {section: {field: value}}})
        assert f"config.{section}.{field}: the chart sets it" in told


@pytest.mark.parametrize(("values", "message"), UNKNOWN, ids=lambda part: str(part)[:60])
def test_the_schema_refuses(values: dict[str, Any], message: str) -> None:
    assert message in refusal(values)


def test_no_prefill_workers_is_a_deployment_too() -> None:
    assert render({"prefill": {"replicas": 0}})


@pytest.mark.parametrize("cpu", ["8", 8, "7500m", None])
def test_a_pod_with_room_for_its_workers_threads_is_taken(cpu: object) -> None:
    roomy = {"resources": {"requests": {"cpu": cpu}}}
    engine = {"engine": {"num_threads": 8}}
    assert render({"config": engine, "prefill": roomy, "decode": roomy})


@pytest.mark.parametrize("values", sorted((CHART / "ci").glob("*.yaml")), ids=lambda p: p.stem)
def test_lint_finds_nothing(values: Any) -> None:
    result = helm("lint", "--strict", CHART, "-f", values)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "WARNING" not in result.stdout
