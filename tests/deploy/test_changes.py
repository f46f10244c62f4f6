"""Every field of a changed config is either made true or refused by name: none is passed over.

The failures guarded against: a ``helm upgrade`` that reports success and changes nothing, one
refused field that keeps all later changes out, and workers that are restarted for what only
supervision goes by.
"""

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from core.channel import DeploymentKeys
from core.config import DeployConfig, SluiceConfig
from core.errors import ConfigError
from deploy.supervision.changes import EFFECTS, OF_ONE_ROLE, Effect
from deploy.supervision.desired import Limits
from deploy.supervision.plan import DeploymentPlan

ROLES = ("prefill", "decode")
CHANGED: dict[str, Any] = {
    "name": "other",
    "prefill": 5,
    "decode": 5,
    "ray_address": "10.0.0.1:6379",
    "upload_code": False,
    "lifetime": "detached",
    "placement": "spread",
    "prefill_resources": {"place": 1.0},
    "decode_resources": {"place": 1.0},
    "start_timeout_s": 17.0,
    "stop_timeout_s": 17.0,
    "drain_timeout_s": 17.0,
    "progress_timeout_s": 17.0,
    "max_restarts": 17,
    "restart_backoff_max_s": 17.0,
    "healthy_after_s": 17.0,
    "max_surge": 17,
}
"""Another value of each field of ``deploy``."""
KEYS = DeploymentKeys.generate()


def of_effect(*effects: Effect) -> list[str]:
    return [name for name, effect in EFFECTS.items() if effect in effects]


def config_of(**sections: dict[str, Any]) -> SluiceConfig:
    return SluiceConfig.parse(dict(sections), source="test")


def plan_of(config: SluiceConfig, *, own_router: bool = True) -> DeploymentPlan:
    address = config.router.control_address
    return DeploymentPlan(
        config=config,
        model_path=Path("/models/m"),
        served_name="m",
        keys=KEYS,
        host="127.0.0.1",
        router_address="tcp://127.0.0.1:7000" if own_router or address is None else address,
        own_router=own_router,
        private=False,
        num_gpus=0,
        environment={},
    )


def changed(field: str) -> tuple[DeploymentPlan, SluiceConfig]:
    """Return a plan, and its config with another value of one field of ``deploy``."""
    return plan_of(config_of()), config_of(deploy={field: CHANGED[field]})


def test_more_workers_than_one_machine_has_memory_for_are_warned_of() -> None:
    on_cluster = plan_of(config_of(cache={"memory_gib": 1}))
    here = replace(on_cluster, private=True)
    assert here.advice({"router": 1, "prefill": 0, "decode": 1}) == ""
    assert "0 prefill and 10000 decode workers take 10" in here.advice({"decode": 10_000})
    assert on_cluster.advice({"decode": 10_000}) == ""


def test_what_a_change_does_is_decided_for_every_field() -> None:
    assert set(EFFECTS) == set(CHANGED) == set(DeployConfig.model_fields)
    assert set(OF_ONE_ROLE) <= set(of_effect(Effect.REPLACES))
    for name, value in CHANGED.items():
        assert getattr(DeployConfig(), name) != value


@pytest.mark.parametrize("field", of_effect(Effect.SUPERVISES))
def test_what_only_supervision_goes_by_reaches_it_and_replaces_no_worker(field: str) -> None:
    plan, config = changed(field)
    updated = plan.updated(config)
    assert getattr(updated.deploy, field) == CHANGED[field]
    assert [updated.revision(role) for role in ROLES] == [plan.revision(role) for role in ROLES]


def test_the_reconciler_goes_by_every_limit_of_supervision() -> None:
    # The driver goes by stop_timeout_s, and the reconciler by a limit of workers as well.
    limits = {*of_effect(Effect.SUPERVISES), "progress_timeout_s"} - {"stop_timeout_s"}
    assert limits == {field.name for field in fields(Limits)}


@pytest.mark.parametrize("field", of_effect(Effect.REPLACES))
def test_what_workers_go_by_replaces_those_that_go_by_it(field: str) -> None:
    plan, config = changed(field)
    updated = plan.updated(config)
    replaced = [role for role in ROLES if updated.revision(role) != plan.revision(role)]
    assert replaced == [role for role in ROLES if OF_ONE_ROLE.get(field, role) == role]
    for role in replaced:
        before, after = plan.launch(role, f"{role}-0"), updated.launch(role, f"{role}-0")
        assert before != after


@pytest.mark.parametrize("field", of_effect(Effect.SCALES))
def test_numbers_of_workers_are_not_the_plans_to_change(field: str) -> None:
    plan, config = changed(field)
    updated = plan.updated(config)
    assert updated == plan, (
        "an update keeps the numbers; who wants others says so to the controller"
    )


@pytest.mark.parametrize("field", of_effect(Effect.REFUSED))
def test_what_cannot_change_is_refused_with_its_value_and_the_way_out(field: str) -> None:
    plan, config = changed(field)
    with pytest.raises(ConfigError) as refusal:
        plan.updated(config)
    assert str(refusal.value).startswith(f"deploy.{field}={CHANGED[field]} (it runs with ")
    assert "take back the change, or stop the deployment by sluice down --name sluice" in str(
        refusal.value
    )
    assert "\n" not in str(refusal.value)


def test_all_that_cannot_change_is_named_at_once() -> None:
    plan = plan_of(config_of())
    config = config_of(
        deploy={"name": "b", "max_surge": 3},
        model={"model": "/models/other"},
        router={"max_attempts": 9},
        security={"keys_dir": "/keys"},
    )
    with pytest.raises(ConfigError) as refusal:
        plan.updated(config)
    told = str(refusal.value).partition(": cannot change")[0]
    assert [part.partition("=")[0] for part in told.split(", ")] == [
        "deploy.name",
        "model.model",
        "router.max_attempts",
        "security.keys_dir",
    ]
    assert "security.keys_dir=/keys (it runs with nothing)" in told


# Routers that run by themselves


def test_what_only_routers_go_by_is_none_of_the_workers_business() -> None:
    own = {"control_address": "tcp://routers:7000"}
    plan = plan_of(config_of(router=own), own_router=False)
    updated = plan.updated(
        config_of(
            router={**own, "max_attempts": 9}, security={"api_keys_file": "/etc/sluice/api-keys"}
        )
    )
    assert [updated.revision(role) for role in ROLES] == [plan.revision(role) for role in ROLES]


def test_another_address_of_the_routers_replaces_workers_by_such_that_report_there() -> None:
    plan = plan_of(config_of(router={"control_address": "tcp://routers:7000"}), own_router=False)
    there = "tcp://routers:7001"
    updated = plan.updated(config_of(router={"control_address": there}))
    for role in ROLES:
        assert updated.revision(role) != plan.revision(role)
        launch: Any = updated.launch(role, f"{role}-0")
        assert launch.service.context.router_address == there

    with pytest.raises(ConfigError, match=r"^router\.control_address: not given"):
        plan.updated(config_of())


def test_the_ports_that_were_found_at_the_start_stay() -> None:
    plan = plan_of(config_of(router={"port": 41234}))
    updated = plan.updated(config_of(router={"port": 0}, scheduler={"max_batch_tokens": 256}))
    launch: Any = updated.launch("router", "router")
    assert launch.service.context.config.router.port == 41234
    assert updated.revision("decode") != plan.revision("decode")


@pytest.mark.parametrize("own_router", [True, False])
def test_what_no_worker_could_be_started_by_is_refused_before_it_is_wanted(
    *, own_router: bool
) -> None:
    """The controller would meet it at each start of a worker, and end by it, again and again."""
    router = {"control_address": "tcp://router:7000"}
    plan = plan_of(config_of(router=router), own_router=own_router)
    with pytest.raises(ConfigError, match=r"model.device: cuda, but Ray sees no GPU"):
        plan.updated(config_of(router=router, model={"device": "cuda"}))
