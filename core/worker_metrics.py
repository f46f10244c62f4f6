"""Metrics that prefill and decode workers share; names and labels follow the field's dashboards."""

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info
from prometheus_client.metrics_core import GaugeMetricFamily, Metric

from core.messages import Role, WorkerLoad

STEP_SECONDS = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 5, 10)
STAGE_SECONDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
BATCH_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)


class WorkerMetrics:
    """What a worker's loop observes; one registry per process."""

    def __init__(self, role: Role) -> None:
        self.registry = CollectorRegistry()
        self._role: Role = role
        self._step_seconds = Histogram(
            "sluice_engine_step_seconds",
            "Duration of one model step, by what it held",
            ("role", "kind"),
            buckets=STEP_SECONDS,
            registry=self.registry,
        )
        self._batch_tokens = Histogram(
            "sluice_batch_tokens",
            "Tokens in one model step",
            ("role",),
            buckets=BATCH_TOKENS,
            registry=self.registry,
        )
        self._batch_size = Histogram(
            "sluice_batch_size",
            "Sequences in one model step",
            ("role",),
            buckets=BATCH_TOKENS[:9],
            registry=self.registry,
        )
        self._prompt_tokens = Counter(
            "sluice_prompt_tokens",
            "Prompt tokens by where their KV came from",
            ("role", "source"),
            registry=self.registry,
        )
        self._generation_tokens = Counter(
            "sluice_generation_tokens", "Tokens sampled", ("role",), registry=self.registry
        )
        self._preemptions = Counter(
            "sluice_preemptions",
            "Sequences that gave their blocks up to be recomputed",
            ("role",),
            registry=self.registry,
        )
        self._preemptions.labels(role)
        self._stage_seconds = Histogram(
            "sluice_stage_duration_seconds",
            "Time of one request in one stage",
            ("stage",),
            buckets=STAGE_SECONDS,
            registry=self.registry,
        )

    def observe_step(self, *, duration_s: float, num_tokens: int, num_sequences: int) -> None:
        """One step completed; it is a decode step where each sequence had one token."""
        kind = "decode" if num_tokens == num_sequences else "prefill"
        self._step_seconds.labels(self._role, kind).observe(duration_s)
        self._batch_tokens.labels(self._role).observe(num_tokens)
        self._batch_size.labels(self._role).observe(num_sequences)

    def count_prompt(self, *, computed: int = 0, cached: int = 0, remote: int = 0) -> None:
        """Prompt tokens of one request by source."""
        by_source = (("computed", computed), ("prefix_cache", cached), ("remote", remote))
        for source, num_tokens in by_source:
            if num_tokens:
                self._prompt_tokens.labels(self._role, source).inc(num_tokens)

    def count_generated(self, num_tokens: int) -> None:
        """Tokens sampled here."""
        self._generation_tokens.labels(self._role).inc(num_tokens)

    def count_preemptions(self, number: int) -> None:
        """Sequences preempted."""
        self._preemptions.labels(self._role).inc(number)

    def observe_stage(self, stage: str, seconds: float) -> None:
        """One request left ``stage`` after ``seconds``."""
        self._stage_seconds.labels(stage).observe(max(0.0, seconds))

    def export_load(self, load: Callable[[], WorkerLoad]) -> None:
        """Export what ``load`` returns at each scrape, to the thread of the metrics server."""
        self.registry.register(_LoadCollector(self._role, load))

    def describe(self, *, version: str, config: dict[str, str]) -> None:
        """Export what runs here as ``sluice_build_info`` and ``sluice_config_info``."""
        build = Info("sluice_build", "Version of this process", ("role",), registry=self.registry)
        build.labels(self._role).info({"version": version})
        described = Info(
            "sluice_config", "What peers must agree on", ("role",), registry=self.registry
        )
        described.labels(self._role).info(config)

    def gauge(self, name: str, description: str, read: Callable[[], float]) -> None:
        """Export ``read()`` at each scrape, by the metrics server's thread, as gauge ``name``."""
        gauge = Gauge(name, description, ("role",), registry=self.registry)
        gauge.labels(self._role).set_function(read)


class _LoadCollector:
    """Gauges of the scheduler's queues."""

    def __init__(self, role: Role, load: Callable[[], WorkerLoad]) -> None:
        self._role = role
        self._load = load

    def collect(self) -> Iterable[Metric]:
        load = self._load()
        rows = (
            ("sluice_running_requests", "Requests in the batch", load.running),
            ("sluice_waiting_requests", "Requests that wait for their turn", load.waiting),
            ("sluice_queued_tokens", "Tokens still to be prefilled", load.queued_tokens),
        )
        for name, text, value in rows:
            family = GaugeMetricFamily(name, text, labels=("role",))
            family.add_metric((self._role,), value)
            yield family
