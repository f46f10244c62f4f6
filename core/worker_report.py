"""What a worker tells the outside: heartbeats to the router, metrics to Prometheus."""

import hashlib
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

import msgspec

from core.ids import Incarnation
from core.lifecycle import Lifecycle
from core.messages import (
    PROTOCOL_VERSION,
    AnyMessage,
    CacheReport,
    CacheState,
    Compatibility,
    Heartbeat,
    ResetCache,
    Role,
    ShowCache,
    ShowTrace,
    TraceReport,
    WorkerLoad,
)
from core.metrics import MetricsServer
from core.router_link import Reporter
from core.router_links import RouterLinks
from core.trace import Recorder
from core.version import VERSION
from core.vllm_aliases import VllmAliases
from core.worker_context import WorkerContext
from core.worker_metrics import WorkerMetrics

log = logging.getLogger(__name__)

RESET_WAIT_S = 1.0
"""For storage, before a reset is answered as pending: the router waits for twice as long."""


class Queues(Protocol):
    """What the report reads of a scheduler."""

    @property
    def num_running(self) -> int:
        """Requests in the batch."""
        ...

    @property
    def num_waiting(self) -> int:
        """Requests not in the batch yet."""
        ...

    @property
    def num_queued_tokens(self) -> int:
        """Tokens still to be prefilled."""
        ...


class Pool(Protocol):
    """What the report reads of a block manager."""

    @property
    def num_allocatable(self) -> int:
        """Blocks that can be handed out now."""
        ...

    @property
    def num_blocks(self) -> int:
        """Blocks of the pool."""
        ...


class Cache(Protocol):
    """What the router may ask of a worker's prefix cache."""

    @property
    def epoch(self) -> str:
        """Of the newest reset that is known; "": none."""
        ...

    def reset(self, epoch: str) -> None:
        """Forget every prefix computed up to now, and name what is stored after ``epoch``."""
        ...

    def state(self) -> CacheState:
        """Return what the cache holds, and how far the last reset is."""
        ...


@dataclass(frozen=True, slots=True)
class ReportedLoad:
    """What a worker's load is read of."""

    queues: Queues
    pool: Pool


@dataclass(frozen=True, slots=True)
class ReportedCache:
    """A worker's cache, and whoever carries out what it decides."""

    control: Cache
    finish_reset: Callable[[float], Awaitable[None]]
    """Carry out what a reset has queued; return when storage has it, or after so many seconds."""


@dataclass(frozen=True, slots=True)
class ReportedServer:
    """Where a worker is reached, and what for."""

    address: str
    max_model_len: int
    """Tokens of prompt and output."""


class WorkerReport:
    """One worker's report. Belongs to one event loop; create it inside that loop."""

    def __init__(
        self,
        role: Role,
        context: WorkerContext,
        lifecycle: Lifecycle,
        *,
        incarnation: Incarnation,
        server: ReportedServer,
        load: ReportedLoad,
        cache: ReportedCache,
        trace: Recorder,
    ) -> None:
        self._role: Role = role
        self._context = context
        self._lifecycle = lifecycle
        self._compat_hash = ""
        self._incarnation = incarnation
        self._server = server
        self._queues = load.queues
        self._pool = load.pool
        self._cache = cache.control
        self._finish_reset = cache.finish_reset
        self._trace = trace
        self.metrics = WorkerMetrics(role)
        self.metrics.export_load(self._load)
        reporter = Reporter(
            context.keys,
            context.worker_id,
            incarnation,
            lifecycle.drain,
            self._heartbeat,
            self._answer,
        )
        self._links = RouterLinks(context.router_address, reporter)
        self._metrics_server = MetricsServer(
            self.metrics.registry,
            host=context.host,
            port=context.config.metrics.port,
            checks={"/livez": self._why_not_live, "/readyz": self._why_not_ready},
        )

    def describe(self, compatibility: Compatibility, *, transport: str) -> None:
        """Export what runs here: workers with another ``compat_hash`` exchange nothing with it."""
        layout = compatibility.kv_layout
        self._compat_hash = _compat_hash(compatibility)
        self.metrics.describe(
            version=VERSION,
            config={
                "model": self._context.served_name,
                "kv_dtype": layout.dtype,
                "block_size": str(layout.block_size),
                "compat_hash": self._compat_hash,
                "tp": str(compatibility.tensor_parallel_size),
                "transport": transport,
            },
        )
        if self._context.config.metrics.vllm_aliases:
            aliases = VllmAliases(
                self._context.served_name, self._load, block_size=layout.block_size
            )
            self.metrics.registry.register(aliases)

    async def run(self) -> None:
        """Report to every router until cancelled."""
        await self._links.run()

    def close(self) -> None:
        """Stop answering Prometheus."""
        self._metrics_server.close()

    def _why_not_live(self) -> str | None:
        """Answer ``/livez``, from another thread."""
        limit_s = self._context.config.deploy.progress_timeout_s
        silence_s = self._lifecycle.health().silence_s
        if silence_s <= limit_s:
            return None
        return f"no progress for {silence_s:.0f} s (deploy.progress_timeout_s={limit_s:g})"

    def _why_not_ready(self) -> str | None:
        """Answer ``/readyz``, from another thread."""
        health = self._lifecycle.health()
        if health.state != "ready":
            return health.state
        if not self._links.is_connected:
            return "no router has taken this worker"
        if self._role == "decode" and not health.num_steps:
            return "nothing has been generated yet"
        return None

    def _load(self) -> WorkerLoad:
        return WorkerLoad(
            running=self._queues.num_running,
            waiting=self._queues.num_waiting,
            queued_tokens=self._queues.num_queued_tokens,
            free_blocks=self._pool.num_allocatable,
            total_blocks=self._pool.num_blocks,
        )

    def _heartbeat(self) -> Heartbeat:
        return Heartbeat(
            worker_id=self._context.worker_id,
            role=self._role,
            incarnation=self._incarnation,
            address=self._server.address,
            model=self._context.served_name,
            max_model_len=self._server.max_model_len,
            load=self._load(),
            state="draining" if self._lifecycle.drain.is_set() else "ready",
            metrics_address=self._metrics_server.address,
            cache_epoch=self._cache.epoch,
            compat_hash=self._compat_hash,
            revision=self._context.revision,
            desired=self._lifecycle.desired,
            controller_silence_s=self._lifecycle.controller_silence_s(),
        )

    async def _answer(self, message: AnyMessage) -> CacheReport | TraceReport | None:
        match message:
            case ShowTrace():
                return self._trace_report(message)
            case ResetCache(number, epoch):
                self._cache.reset(epoch)
                log.info("event=cache_reset number=%d epoch=%s", number, self._cache.epoch)
                await self._finish_reset(RESET_WAIT_S)
            case ShowCache(number):
                pass
            case _:
                log.warning("dropped=%s reason=not for a report", type(message).__name__)
                return None
        return CacheReport(
            number=number,
            worker_id=self._context.worker_id,
            role=self._role,
            incarnation=self._incarnation,
            state=self._cache.state(),
        )

    def _trace_report(self, question: ShowTrace) -> TraceReport:
        return TraceReport(
            number=question.number,
            worker_id=self._context.worker_id,
            role=self._role,
            incarnation=self._incarnation,
            now_s=self._trace.now(),
            events=self._trace.events(question.request_id),
        )


def _compat_hash(compatibility: Compatibility) -> str:
    """Return a name for what both sides must have alike; what can be bridged is not in it."""
    alike = (
        PROTOCOL_VERSION,
        compatibility.model_fingerprint,
        compatibility.tokenizer_fingerprint,
        compatibility.total_kv_heads,
        compatibility.model_dtype,
        compatibility.features,
    )
    return hashlib.sha256(msgspec.json.encode(alike)).hexdigest()[:16]
