"""The router's metrics. Labels are bounded: no request, no client, no free text."""

import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from typing import Final, Literal, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from core.deployment_config import RouterConfig
from core.messages import CacheReport, Failed, Output, Role, TraceReport
from core.version import VERSION
from router.policy import FailureKind

CONTENT_TYPE: Final = CONTENT_TYPE_LATEST
Stage = Literal["tokenize", "route", "generate"]
CancelCause = Literal["client", "timeout", "shutdown", "failed"]
Phase = Literal["choose", "output"]
"""Of the router's own work: picking an attempt's workers; an output's tokens to text."""
_LATENCY_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_TOKEN_GAP_S = (
    *(0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5),
    *(5.0, 10.0, 30.0, 60.0),
)
_DURATION_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
_OVERHEAD_S = (0.00001, 0.00005, 0.0001, 0.0005, 0.001, 0.005, 0.01, 0.05, 0.1, 0.5)
_STAGE_S = (0.0001, 0.0005, 0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 30.0)
_MAY_BE_LATE = (Output, Failed, CacheReport, TraceReport)
"""Messages that whoever waited for them can have given up; another one is a worker's fault."""
_TOKENS = tuple(float(2**power) for power in range(18))


@dataclass(frozen=True, slots=True)
class LatencyGoals:
    """What counts as in time; in seconds."""

    ttft_s: float = RouterConfig().slo_ttft_s
    itl_s: float = RouterConfig().slo_itl_s
    """Mean over a sequence's tokens after the first."""


class RouterMetrics:
    """One router's metrics in a registry of its own, so that two routers fit in one process."""

    def __init__(self, goals: LatencyGoals | None = None) -> None:
        self.registry = CollectorRegistry()
        self.goals = LatencyGoals() if goals is None else goals
        self._add_requests()
        self._add_latencies()
        self._add_goals()
        self._add_routing()
        build = Info("sluice_build", "Version of this process", ["role"], registry=self.registry)
        build.labels("router").info({"version": VERSION})

    def _add_requests(self) -> None:
        self.requests = Counter(
            "sluice_requests_total",
            "HTTP requests; 499: the client left",
            ["model", "endpoint", "code"],
            registry=self.registry,
        )
        self.rejections = self._counter(
            "sluice_rejections_total",
            "Requests turned away before any worker saw them",
            reason=("queue_full", "no_worker"),
        )
        self.cancellations = self._counter(
            "sluice_cancellations_total",
            "Sequences cancelled by the client, a timeout, a shutdown or a failed sibling; stage:"
            " what they waited for, a first token (prefill) or more (decode)",
            stage=get_args(Role),
            cause=get_args(CancelCause),
        )
        self.input_tokens = self._tokens("sluice_input_tokens", "Prompt tokens of a sequence")
        self.output_tokens = self._tokens("sluice_output_tokens", "Output tokens of a sequence")
        self.cached_tokens = self._tokens(
            "sluice_cached_tokens", "Prompt tokens of a sequence found in a prefix cache"
        )

    def _add_latencies(self) -> None:
        self.request_duration = Histogram(
            "sluice_request_duration_seconds",
            "From the request's head to the response's last byte",
            ["model", "endpoint"],
            buckets=_DURATION_S,
            registry=self.registry,
        )
        self.time_to_first_token = Histogram(
            "sluice_time_to_first_token_seconds",
            "From the parsed request to the first token of a sequence",
            ["model"],
            buckets=_LATENCY_S,
            registry=self.registry,
        )
        self.inter_token_latency = Histogram(
            "sluice_inter_token_latency_seconds",
            "Between two outputs of a sequence",
            ["model"],
            buckets=_TOKEN_GAP_S,
            registry=self.registry,
        )
        self.time_per_output_token = Histogram(
            "sluice_time_per_output_token_seconds",
            "Mean over a sequence's tokens after the first",
            ["model"],
            buckets=_TOKEN_GAP_S,
            registry=self.registry,
        )
        self.stage_duration = Histogram(
            "sluice_stage_duration_seconds",
            "Time in a stage of the router: tokenize, route (wait for a worker), generate",
            ["stage"],
            buckets=_STAGE_S,
            registry=self.registry,
        )
        self.stage_requests = Gauge(
            "sluice_stage_requests",
            "Sequences in a stage of the router",
            ["stage"],
            registry=self.registry,
        )

    def _add_goals(self) -> None:
        self._in_time = Counter(
            "sluice_slo_requests_total",
            "Ended sequences by whether they were in time; cancelled ones are left out",
            ["model", "slo", "met"],
            registry=self.registry,
        )
        seconds = Gauge(
            "sluice_slo_seconds", "What counts as in time", ["slo"], registry=self.registry
        )
        seconds.labels("ttft").set(self.goals.ttft_s)
        seconds.labels("itl").set(self.goals.itl_s)

    def count_in_time(self, model: str, *, ttft: bool, itl: bool) -> None:
        """One sequence ended; each goal was met or not."""
        for slo, met in (("ttft", ttft), ("itl", itl), ("both", ttft and itl)):
            self._in_time.labels(model=model, slo=slo, met=str(met).lower()).inc()

    def _add_routing(self) -> None:
        overhead = Histogram(
            "sluice_router_overhead_seconds",
            "The router's own work for one attempt (choose) or one output (output)",
            ["phase"],
            buckets=_OVERHEAD_S,
            registry=self.registry,
        )
        self._overhead = {phase: overhead.labels(phase=phase) for phase in get_args(Phase)}
        self.worker_restarts = self._counter(
            "sluice_worker_restarts_total",
            "New processes that reported in the place of earlier ones",
            role=get_args(Role),
        )
        self.route_decisions = Counter(
            "sluice_route_decisions_total",
            "Attempts sent to a worker",
            ["policy", "path", "reason"],
            registry=self.registry,
        )
        self.retries = self._counter(
            "sluice_retries_total",
            "Attempts after the first; stage: of the failed one",
            stage=get_args(Role),
            reason=get_args(FailureKind),
        )
        self.retries_exhausted = self._counter(
            "sluice_retries_exhausted_total",
            "Sequences failed after their last attempt",
            stage=get_args(Role),
            reason=get_args(FailureKind),
        )
        self.stale_messages = self._counter(
            "sluice_stale_messages_total",
            "Messages of ended attempts and replaced workers, dropped",
            message=[each.__name__ for each in _MAY_BE_LATE],
        )
        self.workers = Gauge(
            "sluice_workers",
            "Living workers; starting: not yet proven by a generation",
            ["role", "state"],
            registry=self.registry,
        )
        self.workers_desired = Gauge(
            "sluice_workers_desired",
            "Workers that the operator wants, as the living ones were told; absent until one was",
            ["role"],
            registry=self.registry,
        )
        self.controller_silence = Gauge(
            "sluice_controller_silence_seconds",
            "Since the deployment's controller last told anybody how many workers are wanted, which"
            " it does each second; NaN: it never has, or nobody who knows lives",
            registry=self.registry,
        )

    def _counter(self, name: str, documentation: str, **labels: Sequence[str]) -> Counter:
        """Add a counter whose labels' values are known: all series are there from the start.

        A panel is then not empty while nothing went wrong, and ``increase`` and ``rate``, which do
        not see a series that begins with 1, miss no first event.
        """
        counter = Counter(name, documentation, list(labels), registry=self.registry)
        for values in product(*labels.values()):
            counter.labels(*values)
        return counter

    @contextmanager
    def overhead(self, phase: Phase) -> Generator[None]:
        """Time what is done inside as the router's own work."""
        start_s = time.monotonic()
        try:
            yield
        finally:
            self._overhead[phase].observe(time.monotonic() - start_s)

    @contextmanager
    def stage(self, stage: Stage) -> Generator[None]:
        """Count and time what is done inside as being in ``stage``."""
        gauge = self.stage_requests.labels(stage=stage)
        gauge.inc()
        start_s = time.monotonic()
        try:
            yield
        finally:
            gauge.dec()
            self.stage_duration.labels(stage=stage).observe(time.monotonic() - start_s)

    def _tokens(self, name: str, documentation: str) -> Histogram:
        return Histogram(name, documentation, ["model"], buckets=_TOKENS, registry=self.registry)

    def render(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self.registry)
