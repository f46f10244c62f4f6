"""What ``sluice scale`` may want: never less than no worker, nor of one that is on its way out."""

from collections.abc import Mapping

import pytest

from core.errors import ConfigError
from core.messages import Role
from deploy.supervision.desired import Desired, Observed, State, Target
from deploy.supervision.scaling import check_targets, scaled


def desired(prefill: int, decode: int) -> Desired:
    return Desired({"prefill": Target(prefill, "a"), "decode": Target(decode, "a")})


def seen(**states: State) -> dict[str, Observed]:
    there: dict[str, Observed] = {}
    for key, state in states.items():
        name = key.replace("_", "-")
        role = "prefill" if name.startswith("prefill-") else "decode"
        there[name] = Observed(name, role, "a", state)
    return there


def scale(
    wanted: Desired,
    observed: Mapping[str, Observed],
    counts: Mapping[Role, int],
    roles: Mapping[str, Role],
) -> Desired:
    return scaled(wanted, observed, counts, roles, lambda _role: "b")


def numbers(wanted: Desired) -> dict[str, int]:
    return {role: target.replicas for role, target in wanted.targets.items()}


@pytest.mark.parametrize("state", ["draining", "ended", "dead", "refused"])
def test_a_worker_on_its_way_out_is_given_no_other_role(state: State) -> None:
    observed = seen(prefill_0=state, prefill_1="ready", decode_0="ready")
    with pytest.raises(
        ConfigError, match=rf"prefill-0=decode: prefill-0 is {state}; .*(name|mend)"
    ):
        scale(desired(1, 1), observed, {}, {"prefill-0": "decode"})


@pytest.mark.parametrize("state", ["pending", "starting", "ready"])
def test_a_worker_that_is_up_changes_its_role(state: State) -> None:
    observed = seen(prefill_0=state, decode_0="ready")
    wanted = scale(desired(1, 1), observed, {}, {"prefill-0": "decode"})
    assert numbers(wanted) == {"prefill": 0, "decode": 2}
    assert wanted.leaving == {"prefill-0": "decode"}
    assert wanted.generation == 1


def test_who_cannot_change_its_role_is_told_apart_from_who_has_it_already() -> None:
    observed = seen(prefill_0="ready", decode_0="ready")
    for name in ("decode-7", "router"):
        observed["router"] = Observed("router", "router", "a", "ready")
        with pytest.raises(ConfigError, match=f"{name}=decode: there is no such worker"):
            scale(desired(1, 1), observed, {}, {name: "decode"})
    with pytest.raises(ConfigError, match="decode-0=decode: decode-0 is a decode worker already"):
        scale(desired(1, 1), observed, {}, {"decode-0": "decode"})
    leaves = scale(desired(1, 1), observed, {}, {"prefill-0": "decode"})
    roles: tuple[Role, ...] = ("prefill", "decode")
    for role in roles:
        with pytest.raises(ConfigError, match=f"prefill-0={role}: it is changing its role already"):
            scale(leaves, observed, {}, {"prefill-0": role})


def test_no_number_falls_below_none_though_a_worker_still_looks_ready() -> None:
    observed = seen(prefill_0="ready", decode_0="ready")
    with pytest.raises(ConfigError, match=r"prefill=-1: .*prefill=N"):
        scale(desired(0, 1), observed, {}, {"prefill-0": "decode"})
    with pytest.raises(ConfigError, match=r"prefill=-1: "):
        scale(desired(1, 1), observed, {"prefill": 0}, {"prefill-0": "decode"})


def test_one_decode_worker_stays() -> None:
    observed = seen(prefill_0="ready", decode_0="ready")
    with pytest.raises(ConfigError, match="decode=0: one decode worker has to stay"):
        scale(desired(1, 1), observed, {}, {"decode-0": "prefill"})
    crosswise: dict[str, Role] = {"decode-0": "prefill", "prefill-0": "decode"}
    assert numbers(scale(desired(1, 1), observed, {}, crosswise)) == {"prefill": 1, "decode": 1}


def test_a_number_that_cannot_be_is_refused_from_wherever_it_comes() -> None:
    check_targets({"router": Target(1, "a"), "prefill": Target(0, "a"), "decode": Target(1, "a")})
    with pytest.raises(ConfigError, match="prefill=-1"):
        check_targets({"prefill": Target(-1, "a"), "decode": Target(1, "a")})
    with pytest.raises(ConfigError, match="decode=0"):
        check_targets({"decode": Target(0, "a")})
