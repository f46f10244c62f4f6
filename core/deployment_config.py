"""Which processes run, where, and who may reach them: the sections that all roles share."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from core.config_fields import (
    MAX_SECONDS,
    NAME_PATTERN,
    ConfigSection,
    NonNegativeInt,
    Port,
    PositiveInt,
    Seconds,
)
from core.messages.base import Role

Resources = dict[
    Annotated[str, Field(min_length=1, max_length=128)], Annotated[float, Field(gt=0, le=1024)]
]
"""Amounts by the name of a Ray resource."""


def _absolute(path: Path) -> Path:
    if not path.is_absolute():
        raise ValueError("must be an absolute path: every process looks for it where it runs")
    return path


def _tcp_address(address: str) -> str:
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    if not address.startswith("tcp://") or not host or not port.isdecimal():
        raise ValueError("must be tcp://HOST:PORT")
    return address


AbsolutePath = Annotated[Path, AfterValidator(_absolute)]


class RouterConfig(ConfigSection):
    """The OpenAI API and the choice of workers."""

    host: Annotated[str, Field(min_length=1)] = "127.0.0.1"
    """Where the API listens; ``0.0.0.0``: on all addresses."""
    port: Port = 8000
    """Of the API; 0: a free one."""
    control_port: Port = 0
    """Where workers report; 0: a free one."""
    control_address: Annotated[str, AfterValidator(_tcp_address)] | None = None
    """``tcp://HOST:PORT`` where workers find routers that run by themselves (``sluice router``);
    they report to every address that HOST has. By default a deployment starts its own router."""
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
    write_timeout_s: Seconds = 30.0
    """A client that takes nothing of its answer for this long counts as gone."""
    worker_silence_s: Seconds = 4.0
    """A worker silent for longer gets no requests, and its requests are retried."""
    admission_wait_s: Seconds = 5.0
    """How long a request waits for a ready decode worker before a 503."""
    drain_delay_s: Annotated[float, Field(ge=0, le=MAX_SECONDS)] = 0.0
    """How long a router that drains still takes requests, while ``/readyz`` is 503 and answers end
    their connections: until whatever spreads requests over routers has noticed. Part of
    ``deploy.drain_timeout_s``."""
    slo_ttft_s: Seconds = 2.0
    """A first token within this time counts as in time, in metrics alone."""
    slo_itl_s: Seconds = 0.2
    """A request whose mean time between tokens is at most this counts as in time, in metrics
    alone."""


class SecurityConfig(ConfigSection):
    """Who may talk to the workers, to the router's control port, and to the API."""

    keys_dir: AbsolutePath | None = None
    """A folder with the key files that ``sluice keys`` makes, such as a mounted secret: the same
    path on every machine. By default every deployment makes keys of its own, which Ray carries to
    its processes."""
    api_keys_file: AbsolutePath | None = None
    """A file with one API key per line, such as a mounted secret; clients send one of them as
    ``Authorization: Bearer KEY``. Read again when it changes. By default the API asks for none."""


class MetricsConfig(ConfigSection):
    """What Prometheus scrapes of workers; the router's metrics are at its API's ``/metrics``."""

    port: Port = 0
    """Of a worker's metrics and health; 0: a free one, as several workers on one machine need."""
    vllm_aliases: bool = False
    """Also export the four ``vllm:`` gauges that gateway endpoint pickers read."""


class DeployConfig(ConfigSection):
    """Which processes run."""

    name: Annotated[str, Field(pattern=NAME_PATTERN)] = "sluice"
    """Of this deployment, among those of one Ray cluster."""
    prefill: NonNegativeInt = 1
    """Prefill workers; 0 serves everything on decode workers."""
    decode: PositiveInt = 1
    """Decode workers."""
    ray_address: str | None = None
    """A running Ray cluster, ``auto`` for the one of this machine; by default one is started on
    this machine and stopped at the end."""
    upload_code: bool = True
    """Give a running cluster this program's code; false where its image has the same already."""
    lifetime: Literal["job", "detached"] = "job"
    """``job``: everything ends with the process that started it, however that ends; ``detached``:
    on a running cluster it goes on until ``sluice down``."""
    placement: Literal["any", "spread"] = "any"
    """``spread``: workers on as many nodes of a running cluster as there is room; the ranks of one
    worker are always on one node."""
    prefill_resources: Resources = Field(default_factory=Resources)
    """Ray resources that a prefill worker takes beside its CPUs or GPUs, such as
    ``{sluice_prefill: 1}``, which only some nodes offer."""
    decode_resources: Resources = Field(default_factory=Resources)
    """Ray resources that a decode worker takes beside its CPUs or GPUs."""
    start_timeout_s: Seconds = 300.0
    """Until every worker is ready, else all is stopped again; later, until a worker whose process
    is up is ready, else it is started anew."""
    stop_timeout_s: Seconds = 10.0
    """Until everything has stopped; what has not is killed."""
    drain_timeout_s: Seconds = 60.0
    """Until a worker that gets no more requests has finished those it has; then it is stopped, and
    the router retries what is left."""
    progress_timeout_s: Seconds = 60.0
    """A worker whose step, or whose event loop, stands still for longer is started anew."""
    max_restarts: NonNegativeInt = 100
    """Of one worker in a row, before it stays down; being healthy for ``healthy_after_s`` ends the
    row."""
    restart_backoff_max_s: Seconds = 30.0
    """Longest wait before a restart; the first is at once, and each further one waits longer."""
    healthy_after_s: Seconds = 120.0
    """A worker that has run for so long has recovered: its next restart is a first one."""
    max_surge: NonNegativeInt = 1
    """Workers of a role beyond its number while an update replaces them one by one. 0: each old one
    is drained before its successor starts, for clusters that have no room beyond the number."""

    @property
    def counts(self) -> Mapping[Role, int]:
        """The number of workers of each role, which may be 0."""
        return {"prefill": self.prefill, "decode": self.decode}
