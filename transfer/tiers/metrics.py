"""Bytes and durations of what moves between pool, host memory and storage."""

from collections.abc import Callable
from itertools import product
from typing import Literal, TypeAlias, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from core.tiers import Tier

SECONDS = (0.0001, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
Direction: TypeAlias = Literal["in", "out"]
"""As seen from the tier above: ``in`` comes back up."""
Kind: TypeAlias = Literal["store", "load", "write", "find", "read"]


class MoveMetrics:
    """What the movers observe."""

    def __init__(self, registry: CollectorRegistry, *, role: str) -> None:
        self._registry = registry
        self._role = role
        self._bytes = Counter(
            "sluice_kv_tier_bytes",
            "Bytes moved out to a tier, or in from it",
            ("role", "tier", "direction"),
            registry=registry,
        )
        for tier, direction in product((Tier.HOST, Tier.STORAGE), get_args(Direction)):
            self._bytes.labels(role, tier, direction)
        self._seconds = Histogram(
            "sluice_kv_tier_seconds",
            "Duration of one operation: store, load (host memory), write, find, read (storage)",
            ("role", "kind"),
            buckets=SECONDS,
            registry=registry,
        )

    def count_bytes(self, tier: Tier, direction: Direction, nbytes: int) -> None:
        """``nbytes`` were moved."""
        self._bytes.labels(self._role, tier, direction).inc(nbytes)

    def observe(self, kind: Kind, seconds: float) -> None:
        """One operation is over, failed or not."""
        self._seconds.labels(self._role, kind).observe(seconds)

    def gauge(self, name: str, text: str, read: Callable[[], float]) -> None:
        """Export ``read()`` at each scrape."""
        gauge = Gauge(name, text, ("role",), registry=self._registry)
        gauge.labels(self._role).set_function(read)
