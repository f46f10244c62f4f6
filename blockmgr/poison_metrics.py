"""That poison is at work, as a Prometheus metric: a hit ends the worker, so none is counted."""

from collections.abc import Iterable

from prometheus_client.metrics_core import CounterMetricFamily, Metric

from blockmgr.poison import Poison


class PoisonCollector:
    """Register in a ``CollectorRegistry``. Reads one integer, so from any thread."""

    def __init__(self, poison: Poison, *, role: str) -> None:
        self._poison = poison
        self._role = role

    def collect(self) -> Iterable[Metric]:
        """Yield the metric's value now."""
        verified = CounterMetricFamily(
            "sluice_kv_poison_verified_blocks",
            "Blocks that were allocated with their poison whole",
            labels=("role",),
        )
        verified.add_metric((self._role,), self._poison.num_verified)
        yield verified
