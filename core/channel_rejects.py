"""What a channel did not let in, counted by reason and told without flooding the log."""

import logging
from collections.abc import Iterable
from typing import Literal, TypeAlias, get_args

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import CounterMetricFamily, Metric

log = logging.getLogger(__name__)

Reason: TypeAlias = Literal[
    "key", "handshake", "version", "refused", "stale_client", "protocol", "message", "load"
]
"""A key that is not admitted; a connection that is none of ours or gave up; another version; what
the owner does not pair with; what comes of a client that was given up and has not noticed; what is
out of order; what is unreadable; more than is taken."""

LOG_INTERVAL_S = 10.0


class Rejects:
    """Counts of one channel, since its start."""

    def __init__(self) -> None:
        # All keys from the start: a scrape walks it from another thread.
        self.counts: dict[Reason, int] = dict.fromkeys(get_args(Reason), 0)
        self._told: dict[Reason, tuple[float, int]] = {}

    def count(self, reason: Reason, detail: object, *, now: float) -> None:
        """One more. The log gets one line per reason and ``LOG_INTERVAL_S``, with the number."""
        self.counts[reason] += 1
        told_at, told = self._told.get(reason, (-LOG_INTERVAL_S, 0))
        if now - told_at < LOG_INTERVAL_S:
            return
        count = self.counts[reason]
        self._told[reason] = (now, count)
        log.warning("event=rejected reason=%s new=%d detail=%.200s", reason, count - told, detail)

    def export(self, registry: CollectorRegistry) -> None:
        """Export the counts as ``sluice_channel_rejects_total``."""
        registry.register(self)

    def collect(self) -> Iterable[Metric]:
        """Yield the counts now."""
        family = CounterMetricFamily(
            "sluice_channel_rejects",
            "Connections and messages that the control channel did not take",
            labels=("reason",),
        )
        for reason, count in self.counts.items():
            family.add_metric((reason,), count)
        yield family
