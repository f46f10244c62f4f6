"""The router's metrics. Labels are bounded: no request, no client, no free text."""

import time
from collections.abc import Generator
from contextlib import contextmanager
from typing import Final, Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

CONTENT_TYPE: Final = CONTENT_TYPE_LATEST
Stage = Literal["tokenize", "route", "generate"]
_LATENCY_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_TOKEN_GAP_S = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)
_DURATION_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
_STAGE_S = (0.0001, 0.0005, 0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 30.0)
_TOKENS = tuple(float(2**power) for power in range(18))


class RouterMetrics:
    """One router's metrics in a registry of its own, so that two routers fit in one process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._add_requests()
        self._add_latencies()
        self._add_routing()

    def _add_requests(self) -> None:
        self.requests = Counter(
            "sluice_requests_total",
            "HTTP requests; 499: the client left",
            ["model", "endpoint", "code"],
            registry=self.registry,
        )
        self.rejections = Counter(
            "sluice_rejections_total",
            "Requests turned away before any worker saw them",
            ["reason"],
            registry=self.registry,
        )
        self.cancellations = Counter(
            "sluice_cancellations_total",
            "Sequences cancelled by the client, a timeout, a shutdown or a failed sibling",
            ["cause"],
            registry=self.registry,
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

    def _add_routing(self) -> None:
        self.route_decisions = Counter(
            "sluice_route_decisions_total",
            "Attempts sent to a worker",
            ["policy", "path", "reason"],
            registry=self.registry,
        )
        self.retries = Counter(
            "sluice_retries_total",
            "Attempts after the first; stage: of the failed one",
            ["stage", "reason"],
            registry=self.registry,
        )
        self.retries_exhausted = Counter(
            "sluice_retries_exhausted_total",
            "Sequences failed after their last attempt",
            ["stage", "reason"],
            registry=self.registry,
        )
        self.stale_messages = Counter(
            "sluice_stale_messages_total",
            "Messages of ended attempts and replaced workers, dropped",
            ["message"],
            registry=self.registry,
        )
        self.workers = Gauge(
            "sluice_workers",
            "Living workers; starting: not yet proven by a generation",
            ["role", "state"],
            registry=self.registry,
        )

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
