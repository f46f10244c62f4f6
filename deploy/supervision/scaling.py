"""What ``sluice scale`` and ``update`` make of what is wanted, or why that cannot be. Pure."""

from collections.abc import Callable, Mapping
from dataclasses import replace

from core.errors import ConfigError
from core.messages import Party, Role
from deploy.supervision.desired import Desired, Observed, State, Target

WHAT_TO_DO: Mapping[State, str] = {
    "draining": "it ends anyway; name another worker, or change the numbers: prefill=N decode=N",
    "ended": "it is over; name another worker, or change the numbers: prefill=N decode=N",
    "dead": "wait until it is ready again, or name another worker",
    "refused": "it is down by a config error; see its log, and mend that by sluice update",
}
"""About a worker that cannot change its role, by its state."""


def scaled(
    desired: Desired,
    observed: Mapping[str, Observed],
    counts: Mapping[Role, int],
    roles: Mapping[str, Role],
    revision: Callable[[Party], str],
) -> Desired:
    """Return what is wanted with ``counts`` of the roles, and the named workers in other roles.

    Raises:
        ConfigError: names the worker or the number that cannot be, and what to do.
    """
    targets = dict(desired.targets)
    leaving = dict(desired.leaving)
    for role, count in counts.items():
        targets[role] = Target(count, revision(role))
    for name, role in roles.items():
        old = _role_of_movable(name, role, observed, leaving)
        leaving[name] = role
        changes: dict[Party, int] = {old: -1, role: 1}
        for party, by in changes.items():
            target = targets.get(party, Target(0, revision(party)))
            targets[party] = replace(target, replicas=target.replicas + by)
    check_targets(targets)
    return Desired(targets, leaving, desired.generation + 1)


def rebased(
    desired: Desired, counts: Mapping[Party, int], revision: Callable[[Party], str]
) -> Desired:
    """Return what is wanted with all workers by the config of ``revision``.

    As many as before, but for the roles in ``counts``.

    Raises:
        ConfigError: names the number that cannot be.
    """
    replicas: dict[Party, int] = {role: target.replicas for role, target in desired.targets.items()}
    targets: dict[Party, Target] = {
        role: Target(number, revision(role)) for role, number in (replicas | dict(counts)).items()
    }
    check_targets(targets)
    return Desired(targets, desired.leaving, desired.generation + 1)


def _role_of_movable(
    name: str, role: Role, observed: Mapping[str, Observed], leaving: Mapping[str, Party]
) -> Party:
    if name not in observed or observed[name].role == "router":
        raise ConfigError(f"{name}={role}: there is no such worker; sluice status shows all")
    if name in leaving:
        raise ConfigError(f"{name}={role}: it is changing its role already")
    if observed[name].role == role:
        raise ConfigError(f"{name}={role}: {name} is a {role} worker already")
    state = observed[name].state
    if state in WHAT_TO_DO:
        raise ConfigError(f"{name}={role}: {name} is {state}; {WHAT_TO_DO[state]}")
    return observed[name].role


def check_targets(targets: Mapping[Party, Target]) -> None:
    """Refuse numbers of workers that cannot be.

    Raises:
        ConfigError: names the role and the number.
    """
    for role, target in targets.items():
        if role == "decode" and target.replicas < 1:
            raise ConfigError(
                f"decode={target.replicas}: one decode worker has to stay; use sluice down to "
                "end all"
            )
        if target.replicas < 0:
            raise ConfigError(
                f"{role}={target.replicas}: fewer than none would be left; name fewer workers "
                f"with --role, or want more with {role}=N"
            )
