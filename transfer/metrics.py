"""What a worker's transfers did, as Prometheus metrics."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, get_args

from prometheus_client import CollectorRegistry, Gauge, Histogram
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from core.ids import Incarnation
from transfer.stats import STALE_EPOCHS, FailureStage, TransferStats
from transfer.transport import PathKind

SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
NBYTES = tuple(4.0**exponent for exponent in range(7, 18))  # 16 KiB to 16 GiB
DESCRIPTORS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096)
POST_SECONDS = (0.00001, 0.000025, 0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.025)
DIRECTION = "pull"
REGISTERED_BYTES = "Bytes that each rank has registered: its pool, and what reads need beside it"
PEER_ROLE: Final = {"decode": "prefill", "prefill": "decode"}
FAILURES: Final[Mapping[FailureStage, tuple[str, str]]] = {
    "handshake": ("handshake", "not_paired"),
    "prefill": ("notify", "prefill_failed"),
    "lease": ("notify", "lease_void"),
    "protocol": ("notify", "bad_ticket"),
    "read": ("data", "read_failed"),
    "peer": ("data", "peer_lost"),
    "integrity": ("data", "checksum"),
}
"""Stage and reason, as the labels have them."""


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
        self._path_of_peer: dict[Incarnation, PathKind] = {}
        self._num_peers: dict[PathKind, int] = dict.fromkeys(get_args(PathKind), 0)
        registry.register(self)
        if role != "decode":
            return
        labels = ("direction", "transport")
        values = (DIRECTION, transport)
        self._seconds = Histogram(
            "sluice_kv_transfer_seconds",
            "From the decision to read until the read was known to be over",
            labels,
            buckets=SECONDS,
            registry=registry,
        ).labels(*values)
        self._nbytes = Histogram(
            "sluice_kv_transfer_size_bytes",
            "Bytes of one read",
            labels,
            buckets=NBYTES,
            registry=registry,
        ).labels(*values)
        self._post_seconds = Histogram(
            "sluice_kv_transfer_post_seconds",
            "That posting one part of a read took the worker's loop",
            labels,
            buckets=POST_SECONDS,
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
        for seconds in self._stats.take_posts():
            self._post_seconds.observe(seconds)

    def observe_handshake(self, seconds: float) -> None:
        """A prefill worker was paired."""
        self._handshake.observe(seconds)

    def observe_path(self, peer: Incarnation, path: PathKind) -> None:
        """Bytes of ``peer`` travel by ``path``; ``unknown`` after pairing, until some have."""
        known = self._path_of_peer.get(peer)
        if known != path and not (known is not None and path == "unknown"):
            self.forget_peer(peer)
            self._path_of_peer[peer] = path
            self._num_peers[path] += 1

    def forget_peer(self, peer: Incarnation) -> None:
        """``peer`` is lost."""
        path = self._path_of_peer.pop(peer, None)
        if path is not None:
            self._num_peers[path] -= 1

    def gauge_by_state(self, name: str, text: str, read: Mapping[str, Callable[[], float]]) -> None:
        """Export what each of ``read`` returns at each scrape, by state."""
        gauge = Gauge(name, text, ("role", "state"), registry=self._registry)
        for state, read_one in read.items():
            gauge.labels(self._role, state).set_function(read_one)

    def in_flight(self, read: Callable[[], float]) -> None:
        """Export how many reads of the other role's memory are in progress."""
        gauge = Gauge(
            "sluice_kv_transfers_in_flight",
            "Reads not terminal",
            ("role", "peer_role"),
            registry=self._registry,
        )
        gauge.labels(self._role, PEER_ROLE[self._role]).set_function(read)

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
        stale_epochs = sum(stats.stale[kind] for kind in STALE_EPOCHS)
        yield self._counter(
            "sluice_kv_stale_epoch_rejects",
            "Messages dropped that named an attempt or an incarnation which is over",
            stale_epochs,
        )
        if self._role != "decode":
            return
        yield self._failures()
        yield self._bytes()
        yield self._paths()
        yield self._counter(
            "sluice_kv_checksum_failures",
            "Reads that brought other bytes than were sent",
            stats.checksum_failures,
        )
        totals = {
            "posted": stats.reads_posted,
            "completed": stats.reads_completed,
            "failed": stats.reads_failed,
            "cancelled": stats.reads_cancelled,
            "timed_out": stats.read_timeouts,
        }
        yield self._by_label("sluice_kv_reads", "Reads by what became of them", "event", totals)
        yield self._counter(
            "sluice_kv_quarantine_alarms",
            "Endpoints torn down because too many blocks were in quarantine",
            stats.quarantine_alarms,
        )

    def _failures(self) -> CounterMetricFamily:
        family = CounterMetricFamily(
            "sluice_kv_transfer_failures",
            "Requests whose KV did not arrive, by where and why",
            labels=("role", "stage", "reason"),
        )
        for failed, (stage, reason) in FAILURES.items():
            family.add_metric((self._role, stage, reason), self._stats.failures[failed])
        return family

    def _bytes(self) -> CounterMetricFamily:
        family = CounterMetricFamily(
            "sluice_kv_transfer_bytes",
            "Bytes of reads that landed",
            labels=("direction", "transport"),
        )
        family.add_metric((DIRECTION, self._transport), self._stats.bytes_total)
        return family

    def _paths(self) -> GaugeMetricFamily:
        family = GaugeMetricFamily(
            "sluice_kv_path_peers",
            "Workers that are read from, by how bytes travel; unknown: none has yet, or untold",
            labels=("role", "peer_role", "transport", "path"),
        )
        for path, count in self._num_peers.items():
            labels = (self._role, PEER_ROLE[self._role], self._transport, path)
            family.add_metric(labels, count)
        return family

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
