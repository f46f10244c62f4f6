"""The one configuration file, validated once and frozen: the same locally, in Ray, in Helm."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal, Self, cast, get_args

from pydantic import Field, ValidationError

from core.config_faults import Fault, list_faults
from core.config_fields import ConfigSection, NonNegativeInt
from core.config_file import read_config_file
from core.config_layers import ConfigLayer, Origin
from core.config_roles import RoleSections, find_mismatches
from core.deployment_config import DeployConfig, MetricsConfig, RouterConfig, SecurityConfig
from core.errors import ConfigError
from core.logs import LogFormat
from core.messages.base import Role
from core.worker_config import (
    CacheConfig,
    EngineConfig,
    HeadWindowConfig,
    KVGroupsConfig,
    ModelConfig,
    SchedulerConfig,
    TransferConfig,
)

__all__ = [
    "CacheConfig",
    "DeployConfig",
    "EngineConfig",
    "HeadWindowConfig",
    "KVGroupsConfig",
    "MetricsConfig",
    "ModelConfig",
    "RouterConfig",
    "SchedulerConfig",
    "SecurityConfig",
    "SluiceConfig",
    "TransferConfig",
]

MAX_FAULTS_TOLD = 10
"""In one line."""


OverriddenSection = Literal["model", "cache", "scheduler", "engine", "transfer"]
Overrides = dict[OverriddenSection, dict[str, object]]
"""Fields by section."""


class SluiceConfig(ConfigSection):
    """The root of the file. Nothing below ``deploy`` reads files or the environment."""

    model: ModelConfig = ModelConfig()
    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    engine: EngineConfig = EngineConfig()
    kv_groups: KVGroupsConfig = KVGroupsConfig()
    transfer: TransferConfig = TransferConfig()
    router: RouterConfig = RouterConfig()
    security: SecurityConfig = SecurityConfig()
    metrics: MetricsConfig = MetricsConfig()
    deploy: DeployConfig = DeployConfig()
    prefill: Overrides = Field(default_factory=Overrides)
    """What prefill workers have otherwise than the sections above, such as
    ``{cache: {memory_gib: 8}}``."""
    decode: Overrides = Field(default_factory=Overrides)
    """What decode workers have otherwise."""
    trace_requests: NonNegativeInt = 512
    """Requests that each process remembers the way of, for ``sluice trace``; 0: none."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """The least severe line that is written."""
    log_format: LogFormat = "text"
    """``json`` writes one object per line, for whatever collects logs."""

    @classmethod
    def load(cls, path: Path) -> Self:
        """Return the validated config in the YAML file at ``path``.

        Raises:
            ConfigError: the file cannot be read, is not YAML, or a field is wrong.
        """
        return cls.of(read_config_file(path))

    @classmethod
    def parse(cls, content: dict[str, object], *, source: str) -> Self:
        """Return the validated config in ``content``, which came from ``source``.

        Raises:
            ConfigError: as ``of``.
        """
        return cls.of(ConfigLayer(content, {(): Origin(source)}))

    @classmethod
    def of(cls, layer: ConfigLayer) -> Self:
        """Return the validated config in ``layer``.

        Raises:
            ConfigError: one line that names every wrong field, where it was given, its value and
                what is allowed.
        """
        faults = cls.find_faults(layer.content)
        if not faults:
            return cls.model_validate(layer.content)
        told = [_told(fault, layer) for fault in faults[:MAX_FAULTS_TOLD]]
        if len(faults) > len(told):
            told.append(f"and {len(faults) - len(told)} more")
        raise ConfigError("; ".join(told))

    @classmethod
    def find_faults(cls, content: Mapping[str, object]) -> list[Fault]:
        """Return all that is wrong with ``content``: alone, by role, and from role to role."""
        faults = _faults(cls, content)
        known = {fault.text for fault in faults}
        for role in get_args(Role):
            overrides = _overrides(content, role)
            sections = {
                section: {**_mapping(content.get(section)), **fields}
                for section, fields in overrides.items()
            }
            faults += [
                _within(fault, role, overrides)
                for fault in _faults(cls, {**content, **sections})
                if fault.text not in known
            ]
        return faults or list(_mismatches(cls.model_validate(content)))

    def for_role(self, role: Role) -> Self:
        """Return what workers of ``role`` go by."""
        overrides = self.prefill if role == "prefill" else self.decode
        if not overrides:
            return self
        content = self.model_dump(exclude={"prefill", "decode"})
        for section, fields in overrides.items():
            content[section] |= fields
        return type(self).model_validate(content)


def _told(fault: Fault, layer: ConfigLayer) -> str:
    origins = layer.origins_of(fault.places)
    return f"{' and '.join(map(str, origins))}: {fault.after(origins)}"


def _faults(kind: type[ConfigSection], content: Mapping[str, object]) -> list[Fault]:
    try:
        kind.model_validate(content)
    except ValidationError as error:
        return list_faults(error, kind)
    return []


def _mismatches(config: SluiceConfig) -> Iterator[Fault]:
    """Yield what contradicts something else, and what keeps the two roles apart."""
    delay_s, timeout_s = config.router.drain_delay_s, config.deploy.drain_timeout_s
    if delay_s >= timeout_s:
        yield Fault(
            (("router", "drain_delay_s"), ("deploy", "drain_timeout_s")),
            "router.drain_delay_s",
            f"{delay_s} leaves no time to finish requests in; give less than "
            f"deploy.drain_timeout_s ({timeout_s})",
        )
    port = config.router.control_port
    if port and port == config.router.port:
        yield Fault(
            (("router", "control_port"), ("router", "port")),
            "router.control_port",
            f"{port} is router.port too, and one process listens on both; "
            "give another one, or 0 for a free one",
        )
    if config.deploy.prefill:
        prefill, decode = (
            RoleSections(own.model, own.cache, own.transfer)
            for own in (config.for_role("prefill"), config.for_role("decode"))
        )
        yield from find_mismatches(prefill, decode, config.kv_groups)


def _overrides(content: Mapping[str, object], role: Role) -> dict[str, dict[str, object]]:
    """Return what of a role's overrides has the right form; the rest is a fault of its own."""
    sections = _mapping(content.get(role))
    return {
        section: _mapping(sections[section])
        for section in get_args(OverriddenSection)
        if section in sections
    }


def _mapping(value: object) -> dict[str, object]:
    return cast("dict[str, object]", value) if isinstance(value, dict) else {}


def _within(fault: Fault, role: Role, overrides: Mapping[str, Mapping[str, object]]) -> Fault:
    """Return ``fault`` as one of the role's part of the file, where its fields stand there."""
    places = tuple(
        (role, *place) if place[1:2] and place[1] in overrides.get(place[0], {}) else place
        for place in fault.places
    )
    return Fault(places, f"{role}.{fault.name}", fault.reason)
