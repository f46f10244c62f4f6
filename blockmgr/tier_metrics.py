"""What the tiers hold and did, as Prometheus metrics, read at each scrape."""

from collections.abc import Iterable

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from blockmgr.tier_book import TierBook
from core.tiers import Tier


class TierCollector:
    """Register in a ``CollectorRegistry``. Every value is derived from the book itself.

    Read by the thread of the metrics server while the loop's thread changes the book. Safe without
    a lock because nothing that grows or shrinks is walked: all that is read is plain integers,
    lengths, and dictionaries whose keys never change. Values of one scrape can be of moments a
    few microseconds apart.
    """

    def __init__(self, book: TierBook, *, role: str) -> None:
        self._book = book
        self._role = role

    def collect(self) -> Iterable[Metric]:
        """Yield the metrics' values now."""
        yield self._blocks()
        stats = self._book.stats
        for name, text, of_host, of_storage in (
            ("sluice_kv_tier_stores", "Blocks sent down", stats.stores, stats.writes),
            ("sluice_kv_tier_fetches", "Blocks brought up", stats.loads, stats.reads),
        ):
            family = CounterMetricFamily(name, text, labels=("role", "tier", "result"))
            for tier, by_result in ((Tier.HOST, of_host), (Tier.STORAGE, of_storage)):
                for result, count in by_result.items():
                    family.add_metric((self._role, tier, result), count)
            yield family
        lookups = CounterMetricFamily(
            "sluice_kv_tier_lookups",
            "Requests that storage was asked for",
            labels=("role", "tier", "result"),
        )
        for result, count in stats.lookups.items():
            lookups.add_metric((self._role, Tier.STORAGE, result), count)
        yield lookups
        evictions = CounterMetricFamily(
            "sluice_kv_tier_evictions", "Blocks thrown out for others", labels=("role", "tier")
        )
        evictions.add_metric((self._role, Tier.HOST), self._book.host.num_evictions)
        yield evictions

    def _blocks(self) -> Metric:
        host = self._book.host
        family = GaugeMetricFamily(
            "sluice_kv_tier_blocks", "Blocks by tier and use", labels=("role", "tier", "state")
        )
        pinned = host.num_pinned
        rows = (
            (Tier.HOST, "cached", max(0, host.num_used - pinned)),  # both may just have changed
            (Tier.HOST, "in_use", pinned),
            (Tier.HOST, "free", host.num_slots - host.num_used),
            (Tier.DEVICE, "being_copied", self._book.num_copied_blocks),
            (Tier.STORAGE, "staged", self._book.num_staged_blocks),
        )
        for tier, state, count in rows:
            family.add_metric((self._role, tier, state), count)
        return family
