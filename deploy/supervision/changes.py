"""What a running deployment makes of a changed config, field by field. Pure.

Each field of ``deploy`` has one of the effects below. Of the other sections, workers go by all but
``router`` and ``security``, so that a change there replaces them.
"""

from collections.abc import Iterator, Mapping
from enum import Enum, auto
from typing import Final

from core.config import SluiceConfig
from core.errors import ConfigError
from core.messages import Role


class Effect(Enum):
    """What a change of a field does to a running deployment."""

    SCALES = auto()  # a number of workers; ``sluice update`` keeps those that there are
    SUPERVISES = auto()  # what supervises goes by it at once; no worker notices
    REPLACES = auto()  # workers are replaced one by one
    REFUSED = auto()


EFFECTS: Final[Mapping[str, Effect]] = {
    "name": Effect.REFUSED,
    "prefill": Effect.SCALES,
    "decode": Effect.SCALES,
    "ray_address": Effect.REFUSED,
    "upload_code": Effect.REFUSED,
    "lifetime": Effect.REFUSED,
    "placement": Effect.REPLACES,
    "prefill_resources": Effect.REPLACES,
    "decode_resources": Effect.REPLACES,
    "start_timeout_s": Effect.SUPERVISES,
    "stop_timeout_s": Effect.SUPERVISES,
    "drain_timeout_s": Effect.SUPERVISES,
    "progress_timeout_s": Effect.REPLACES,  # a worker's /livez goes by it as well
    "max_restarts": Effect.SUPERVISES,
    "restart_backoff_max_s": Effect.SUPERVISES,
    "healthy_after_s": Effect.SUPERVISES,
    "max_surge": Effect.SUPERVISES,
}
"""Of every field of ``DeployConfig``."""
OF_ONE_ROLE: Final[Mapping[str, Role]] = {
    "prefill_resources": "prefill",
    "decode_resources": "decode",
}
"""Fields that replace the workers of that role alone."""
FIXED_OF_MODEL = ("model", "revision", "served_name")
SETTLED_PORTS = ("port", "control_port")
"""Of an own router: where the file gives none, free ones were found at the start, and stay."""


def deploy_settings_of(config: SluiceConfig, role: Role) -> dict[str, object]:
    """Return the fields of ``deploy`` that workers of ``role`` are replaced for."""
    names = {
        name
        for name, effect in EFFECTS.items()
        if effect is Effect.REPLACES and OF_ONE_ROLE.get(name, role) == role
    }
    return config.deploy.model_dump(mode="json", include=names)


def refuse_fixed(old: SluiceConfig, new: SluiceConfig, *, own_router: bool) -> None:
    """Refuse to make ``new`` of ``old`` while the deployment runs.

    Args:
        old: What it runs by.
        new: What is wanted.
        own_router: Whether the deployment starts its router; routers that run by themselves read
            the config themselves.

    Raises:
        ConfigError: names each field that cannot change, its value, and what to do.
    """
    changed = [
        f"{name}={_content(after)} (it runs with {_content(before)})"
        for name, before, after in _fixed(old, new, own_router=own_router)
        if before != after
    ]
    if changed:
        raise ConfigError(
            f"{', '.join(changed)}: cannot change while the deployment runs; take back the change, "
            f"or stop the deployment by sluice down --name {old.deploy.name} and start it anew"
        )


def _fixed(
    old: SluiceConfig, new: SluiceConfig, *, own_router: bool
) -> Iterator[tuple[str, object, object]]:
    """Yield what holds for a deployment's life: name, value before and after."""
    refused = {name for name, effect in EFFECTS.items() if effect is Effect.REFUSED}
    fields: dict[str, set[str]] = {"deploy": refused, "model": set(FIXED_OF_MODEL)}
    if own_router:
        fields["router"] = type(old.router).model_fields.keys() - SETTLED_PORTS
        fields["security"] = set(type(old.security).model_fields)
    else:
        fields["security"] = {"keys_dir"}
    for section, names in fields.items():
        before = getattr(old, section).model_dump(mode="json", include=names)
        after = getattr(new, section).model_dump(mode="json", include=names)
        for name in before:
            yield f"{section}.{name}", before[name], after[name]


def _content(value: object) -> str:
    return "nothing" if value is None else str(value)
