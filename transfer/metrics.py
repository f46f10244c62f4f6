"""What a worker's transfers did, as Prometheus metrics."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Gauge, Histogram
from prometheus_client.metrics_core import CounterMetricFamily, Metric

from transfer.stats import TransferStats

SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
NBYTES = tuple(4.0**exponent for exponent in range(7, 18))  # 16 KiB to 16 GiB
DESCRIPTORS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096)
DIRECTION = "pull"


class TransferMetrics:
    """Exports ``stats``; counters are read at each scrape, ``observe_reads`` feeds histograms.

    Scrapes come from the thread of the metrics server while the loop's thread counts. Safe without
    a lock because all that is read is plain integers, and dictionaries whose keys never change.
    What ``gauge`` is given to read must be as plain.
    """

    def __init__(
        self, stats: TransferStats, registry: CollectorRegistry, *, role: str, transport: str
    ) -> None:
        self._stats = stats
        self._role = role
        self._transport = transport
        self._registry = registry
        registry.register(self)
        if role != "decode":
            return
        labels = ("direction", "transport")
        values = (DIRECTION, transport)
        self._seconds = Histogram(
            "sluice_kv_transfer_seconds",
            "From the decision to read until the read was terminal",
            labels,
            buckets=SECONDS,
            registry=registry,
        ).labels(*values)
        self._nbytes = Histogram(
            "sluice_kv_transfer_bytes",
            "Bytes of one read",
            labels,
            buckets=NBYTES,
            registry=registry,
        ).labels(*values)
        self._descriptors = Histogram(
            "sluice_kv_transfer_descriptors",
            "Descriptors of one read, adjacent blocks merged",
            buckets=DESCRIPTORS,
            registry=registry,
        )
        self._handshake = Histogram(
            "sluice_kv_handshake_seconds",
            "From opening a channel to a paired prefill worker",
            buckets=SECONDS,
            registry=registry,
        )

    def observe_reads(self) -> None:
        """Take the reads that were completed since the last call."""
        for read in self._stats.take_reads():
            self._seconds.observe(read.duration_s)
            self._nbytes.observe(read.nbytes)
            self._descriptors.observe(read.num_descriptors)

    def observe_handshake(self, seconds: float) -> None:
        """A prefill worker was paired."""
        self._handshake.observe(seconds)

    def gauge(self, name: str, text: str, read: Callable[[], float]) -> None:
        """Export ``read()`` at each scrape."""
        gauge = Gauge(name, text, ("role",), registry=self._registry)
        gauge.labels(self._role).set_function(read)

    def collect(self) -> Iterable[Metric]:
        """Yield the counters' values now."""
        stats = self._stats
        yield self._by_label(
            "sluice_kv_lease_events", "Leases by what happened", "event", stats.lease_events
        )
        yield self._by_label(
            "sluice_kv_stale_rejects",
            "Messages and outcomes dropped: of an old attempt, incarnation or read, or twice",
            "kind",
            stats.stale,
        )
        if self._role != "decode":
            return
        yield self._by_label(
            "sluice_kv_transfer_failures",
            "Requests whose KV did not arrive, by where it failed",
            "stage",
            stats.failures,
        )
        yield self._counter(
            "sluice_kv_checksum_failures",
            "Reads that brought other bytes than were sent",
            stats.checksum_failures,
        )
        totals = {
            "posted": stats.reads_posted,
            "completed": stats.reads_completed,
            "failed": stats.reads_failed,
            "timed_out": stats.read_timeouts,
        }
        yield self._by_label("sluice_kv_reads", "Reads by what became of them", "event", totals)
        yield self._counter(
            "sluice_kv_quarantine_alarms",
            "Endpoints torn down because too many blocks were in quarantine",
            stats.quarantine_alarms,
        )

    def _counter(self, name: str, text: str, count: int) -> CounterMetricFamily:
        family = CounterMetricFamily(name, text, labels=("role",))
        family.add_metric((self._role,), count)
        return family

    def _by_label(
        self, name: str, text: str, label: str, counts: Mapping[Any, int]
    ) -> CounterMetricFamily:
        family = CounterMetricFamily(name, text, labels=("role", label))
        for value, count in counts.items():
            family.add_metric((self._role, value), count)
        return family
