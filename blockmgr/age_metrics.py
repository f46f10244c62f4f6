"""The ages of a pool's blocks as Prometheus metrics, read at each scrape."""

import math
from collections.abc import Iterable

from prometheus_client.metrics_core import GaugeMetricFamily, HistogramMetricFamily, Metric

from blockmgr.block_ages import WITHHELD, BlockAges
from blockmgr.sampled_histogram import SampledHistogram
from core.tiers import Tier


class AgeCollector:
    """Register in a ``CollectorRegistry``.

    Read by the thread of the metrics server: histograms are replaced whole, and of the arrays,
    whose length is fixed, one number is taken.
    """

    def __init__(self, ages: BlockAges, *, role: str) -> None:
        self._ages = ages
        self._role = role

    def collect(self) -> Iterable[Metric]:
        """Yield the metrics' values now."""
        for name, text, histogram in (
            ("lifetime", "From allocation until free", self._ages.lifetimes),
            ("idle_before_evict", "In the cache until evicted or reset", self._ages.idle_times),
        ):
            family = HistogramMetricFamily(
                f"sluice_kv_block_{name}_seconds", text, labels=("role", "tier")
            )
            _add(family, (self._role, Tier.DEVICE), histogram)
            yield family
        withheld = HistogramMetricFamily(
            "sluice_kv_block_withheld_seconds",
            "Released, but not reusable yet: a step (fenced) or an operation (quarantined)",
            labels=("role", "state"),
        )
        oldest = GaugeMetricFamily(
            "sluice_kv_block_withheld_oldest_seconds",
            "Longest time that a block has been withheld up to now",
            labels=("role", "state"),
        )
        for state in WITHHELD:
            labels = (self._role, state.name.lower())
            _add(withheld, labels, self._ages.withheld_times[state])
            oldest.add_metric(labels, self._ages.oldest_withheld_s(state))
        yield from (withheld, oldest)


def _add(
    family: HistogramMetricFamily, labels: tuple[str, ...], histogram: SampledHistogram
) -> None:
    totals, seconds = histogram.read()
    buckets = [("+Inf" if math.isinf(bound) else str(bound), total) for bound, total in totals]
    family.add_metric(labels, buckets=buckets, sum_value=seconds)
