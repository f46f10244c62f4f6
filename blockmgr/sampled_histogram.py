"""A histogram that is cheap to feed with the durations of whole batches of blocks."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

_MAX_SAMPLES = 8
"""Of one batch; each stands for an equal part of the batch."""
_MAX_PENDING = 1024
"""Batches that are kept until they are counted."""


class SampledHistogram:
    """Counts durations by bucket. Feeding it only keeps samples; reading it counts them.

    Args:
        bounds: Upper bounds of the buckets, inclusive, ascending; one without bound follows.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = np.array(bounds)
        self._content = _Content(np.zeros(len(bounds) + 1), 0.0, [])

    def observe(self, since: NDArray[np.float64], at: NDArray[np.intp], now: float) -> None:
        """Each of the blocks ``at`` has been something from ``since`` there until ``now``."""
        number = len(at)
        sample = at if number <= _MAX_SAMPLES else at[:: number // _MAX_SAMPLES]
        pending = self._content.pending
        pending.append((since.take(sample), now, number))
        if len(pending) > _MAX_PENDING:
            self._content = self._counted()

    def read(self) -> tuple[list[tuple[float, float]], float]:
        """Return (bound, how many are at most that) for each bucket, and the sum in seconds.

        The last bound is infinite. All are estimates, but for the number of durations. Changes
        nothing, so another thread may read.
        """
        content = self._counted()
        bounds = [*self._bounds.tolist(), float("inf")]
        totals = np.round(np.cumsum(content.counts)).tolist()
        return list(zip(bounds, totals, strict=True)), content.sum_s

    def _counted(self) -> "_Content":
        content = self._content
        if not content.pending:
            return content
        sinces, nows, numbers = zip(*content.pending, strict=True)
        lengths = np.array([len(since) for since in sinces])
        durations = np.maximum(np.repeat(nows, lengths) - np.concatenate(sinces), 0.0)
        weights = np.repeat(np.array(numbers) / lengths, lengths)
        buckets = np.searchsorted(self._bounds, durations)
        counts = content.counts + np.bincount(buckets, weights, minlength=len(content.counts))
        return _Content(counts, content.sum_s + float(durations @ weights), [])


class _Content(NamedTuple):
    """Replaced whole, so that a reader in another thread never counts a batch twice."""

    counts: NDArray[np.float64]
    sum_s: float
    pending: list[tuple[NDArray[np.float64], float, int]]
