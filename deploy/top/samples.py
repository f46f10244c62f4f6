"""One scrape of Prometheus' text format, and what two scrapes of one process say together."""

import math
from collections import defaultdict
from collections.abc import Mapping
from typing import Final

from prometheus_client.parser import text_string_to_metric_families

from core.errors import SluiceError

NO_COUNTS: Final[Mapping[float, float]] = {}


class Samples:
    """The samples of one scrape by name, as the exposition has it (``..._total``, ``..._sum``).

    What is no number, or infinite, counts nothing: it is left out.
    """

    def __init__(self, text: str) -> None:
        """Parse an exposition.

        Raises:
            SluiceError: it is none.
        """
        self._samples: dict[str, list[tuple[Mapping[str, str], float]]] = defaultdict(list)
        try:
            for family in text_string_to_metric_families(text):
                for sample in family.samples:
                    float(sample.labels.get("le", 0))  # is read as a bound later
                    if math.isfinite(sample.value):
                        self._samples[sample.name].append((sample.labels, sample.value))
        except (ValueError, KeyError, IndexError) as error:
            raise SluiceError(f"no metrics in Prometheus' format: {error}") from error

    def total(self, name: str, **labels: str) -> float:
        """Return the sum of the samples with ``labels``; 0 if there is none."""
        return sum(
            value
            for own, value in self._samples.get(name, ())
            if all(own.get(key) == wanted for key, wanted in labels.items())
        )

    def by_label(self, name: str, label: str) -> dict[str, float]:
        """Return the sums of the samples by the value of ``label``."""
        sums: dict[str, float] = defaultdict(float)
        for own, value in self._samples.get(name, ()):
            if label in own:
                sums[own[label]] += value
        return dict(sums)

    def buckets(self, name: str) -> dict[float, float]:
        """Return a histogram's cumulative counts by upper bound, over all of its labels."""
        counts = self.by_label(f"{name}_bucket", "le")
        return {float(bound): count for bound, count in counts.items()}


def increase(before: float, now: float) -> float:
    """Return by how much a counter has grown; one that fell has begun anew, at 0."""
    return now - before if now >= before else now


def quantile(
    share: float, now: Mapping[float, float], before: Mapping[float, float] = NO_COUNTS
) -> float | None:
    """Return below which value ``share`` of what was observed since ``before`` lies.

    As Prometheus' ``histogram_quantile``: evenly within a bucket, and beyond the last finite bound
    that bound. None if nothing was observed.

    Args:
        share: 0 to 1.
        now: Cumulative counts by upper bound.
        before: The same of an earlier scrape.
    """
    if any(now.get(bound, 0.0) < count for bound, count in before.items()):
        before = NO_COUNTS
    counts = [(bound, now[bound] - before.get(bound, 0.0)) for bound in sorted(now)]
    if not counts or counts[-1][1] <= 0:
        return None
    rank = share * counts[-1][1]
    lower, below = 0.0, 0.0
    for bound, count in counts:
        if count >= rank and count > below:
            if math.isinf(bound):
                return lower
            return lower + (bound - lower) * (rank - below) / (count - below)
        lower, below = (lower if math.isinf(bound) else bound), count
    return lower
