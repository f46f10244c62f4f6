"""The one configuration file, validated once and frozen: the same locally, in Ray, in Helm."""

from pathlib import Path
from typing import Annotated, Literal, Self, cast, get_args

import yaml
from pydantic import AfterValidator, Field, ValidationError

from core.config_faults import describe_faults
from core.config_fields import ConfigSection, NonNegativeInt, Port, PositiveInt, Seconds
from core.errors import ConfigError
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
    "ModelConfig",
    "RouterConfig",
    "SchedulerConfig",
    "SecurityConfig",
    "SluiceConfig",
    "TransferConfig",
]


def _absolute(path: Path) -> Path:
    if not path.is_absolute():
        raise ValueError("must be an absolute path: every process looks for it where it runs")
    return path


class RouterConfig(ConfigSection):
    """The OpenAI API and the choice of workers."""

    host: str = "127.0.0.1"
    """Where the API listens; ``0.0.0.0``: on all addresses."""
    port: Port = 8000
    """Of the API; 0: a free one."""
    control_port: Port = 0
    """Where workers report; 0: a free one."""
    local_prefill_max_tokens: NonNegativeInt = 64
    """Prompts of at most this many tokens are prefilled on the decode worker."""
    max_body_mib: PositiveInt = 8
    """Larger request bodies are answered 413."""
    max_pending_requests: PositiveInt = 1024
    """Requests in the router at once; more are answered 503."""
    max_attempts: PositiveInt = 3
    """Of one sequence, the first included, when workers or the network fail."""
    request_timeout_s: Seconds = 600.0
    """Of a whole request."""
    worker_silence_s: Seconds = 4.0
    """A worker silent for longer gets no requests, and its requests are retried."""
    admission_wait_s: Seconds = 5.0
    """How long a request waits for a ready decode worker before a 503."""


class SecurityConfig(ConfigSection):
    """Who may talk to the workers and to the router's control port."""

    keys_dir: Annotated[Path, AfterValidator(_absolute)] | None = None
    """A folder with the key files that ``sluice keys`` makes, such as a mounted secret: the same
    path on every machine. By default every deployment makes keys of its own, which Ray carries to
    its processes."""


class DeployConfig(ConfigSection):
    """Which processes run."""

    prefill: NonNegativeInt = 1
    """Prefill workers; 0 serves everything on decode workers."""
    decode: PositiveInt = 1
    """Decode workers."""
    ray_address: str | None = None
    """A running Ray cluster, ``auto`` for the one of this machine; by default one is started on
    this machine and stopped at the end."""
    start_timeout_s: Seconds = 300.0
    """Until every worker is ready; else all is stopped again."""
    stop_timeout_s: Seconds = 10.0
    """Until everything has stopped; what has not is killed."""
    max_restarts: NonNegativeInt = 100
    """Of one worker, before it stays down."""


Overrides = dict[Literal["model", "cache", "scheduler", "engine", "transfer"], dict[str, object]]
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

    @classmethod
    def load(cls, path: Path) -> Self:
        """Return the validated config in the YAML file at ``path``.

        Raises:
            ConfigError: the file cannot be read, is not YAML, or a field is wrong.
        """
        try:
            content: object = yaml.safe_load(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"config file {path}: {error.strerror}") from error
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            reason = " ".join(str(error).split())
            raise ConfigError(f"config file {path} is not YAML: {reason}") from error
        if not isinstance(content, dict | None):
            raise ConfigError(f"config file {path}: the top level must be a mapping of sections")
        return cls.parse(cast("dict[str, object]", content or {}), source=str(path))

    @classmethod
    def parse(cls, content: dict[str, object], *, source: str) -> Self:
        """Return the validated config in ``content``.

        Raises:
            ConfigError: one line that names every wrong field, its value and what is allowed.
        """
        within = ""
        try:
            config = cls.model_validate(content)
            for role in get_args(Role):
                within = f"{role}."
                config.for_role(role)
        except ValidationError as error:
            raise ConfigError(f"{source}: {describe_faults(error, cls, within=within)}") from error
        return config

    def for_role(self, role: Role) -> Self:
        """Return what workers of ``role`` go by."""
        overrides = self.prefill if role == "prefill" else self.decode
        if not overrides:
            return self
        content = self.model_dump(exclude={"prefill", "decode"})
        for section, fields in overrides.items():
            content[section] |= fields
        return type(self).model_validate(content)
