"""A block manager's states and counters as Prometheus metrics, read at each scrape."""

from collections.abc import Iterable, Mapping

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from blockmgr.block_manager import BlockManager
from core.tiers import Tier


class BlockCollector:
    """Register in a ``CollectorRegistry``. Every value is derived from the manager itself.

    Read by the thread of the metrics server while the loop's thread changes the manager. Safe
    without a lock because nothing that grows or shrinks is walked: all that is read is plain
    integers, and a dictionary whose keys never change. Values of one scrape can be of moments a
    few microseconds apart, so while blocks move their states need not sum to the pool.

    Args:
        blocks: The manager.
        role: Of the worker.
        lower_hit_tokens: Tokens that a tier below the pool had, by tier; always the same tiers.
    """

    def __init__(
        self,
        blocks: BlockManager,
        *,
        role: str,
        lower_hit_tokens: Mapping[Tier, int] | None = None,
    ) -> None:
        self._blocks = blocks
        self._role = role
        self._lower_hit_tokens: Mapping[Tier, int] = (
            {} if lower_hit_tokens is None else lower_hit_tokens
        )

    def collect(self) -> Iterable[Metric]:
        """Yield the metrics' values now."""
        states = GaugeMetricFamily(
            "sluice_kv_blocks", "KV blocks by state", labels=("role", "tier", "state")
        )
        for state, count in self._blocks.counts().items():
            states.add_metric((self._role, Tier.DEVICE, state.name.lower()), count)
        yield states
        stats = self._blocks.stats
        for name, text, value in (
            ("sluice_kv_block_allocations", "Blocks handed out", stats.allocations),
            (
                "sluice_kv_block_alloc_failures",
                "Allocations that found too few blocks",
                stats.allocation_failures,
            ),
            ("sluice_kv_evictions", "Cached blocks handed out anew", stats.evictions),
            (
                "sluice_kv_deferred_releases",
                "Releases that waited for a step in flight",
                stats.deferred_releases,
            ),
            (
                "sluice_kv_window_releases",
                "Blocks released because they fell behind a sliding window",
                stats.pruned_blocks,
            ),
            ("sluice_kv_double_releases", "Second releases, refused", stats.double_releases),
            (
                "sluice_prefix_cache_query_tokens",
                "Tokens looked up in the prefix cache",
                stats.query_tokens,
            ),
        ):
            counter = CounterMetricFamily(name, text, labels=("role", "tier"))
            counter.add_metric((self._role, Tier.DEVICE), value)
            yield counter
        hits = CounterMetricFamily(
            "sluice_prefix_cache_hit_tokens",
            "Tokens found in the prefix cache, by the tier that had them",
            labels=("role", "tier"),
        )
        for tier, num_tokens in ((Tier.DEVICE, stats.hit_tokens), *self._lower_hit_tokens.items()):
            hits.add_metric((self._role, tier), num_tokens)
        yield hits
