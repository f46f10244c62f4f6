"""How long blocks wait as FENCED or QUARANTINED, by a clock and in steps, in bounded memory."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from bench.figures import Figures
from blockmgr.free_queue import BlockIds
from blockmgr.states import BlockState

_BINS_PER_OCTAVE = 32
_NUM_BINS = 40 * _BINS_PER_OCTAVE
_FOLDED_AT_ONCE = 256


class Histogram:
    """Positive numbers in bins that are 2 % wide, from 1 to 2**40."""

    def __init__(self) -> None:
        self._counts: NDArray[np.int64] = np.zeros(_NUM_BINS, dtype=np.int64)
        self._unfolded: list[NDArray[np.int64]] = []

    def add(self, values: NDArray[np.int64]) -> None:
        """Count ``values``; those below 1 as 1."""
        self._unfolded.append(values)
        if len(self._unfolded) == _FOLDED_AT_ONCE:
            self._fold()

    def __len__(self) -> int:
        self._fold()
        return int(self._counts.sum())

    def _fold(self) -> None:
        if self._unfolded:
            values = np.maximum(np.concatenate(self._unfolded), 1)
            self._unfolded.clear()
            bins = (_BINS_PER_OCTAVE * np.log2(values)).astype(np.int64)
            self._counts += np.bincount(np.minimum(bins, _NUM_BINS - 1), minlength=_NUM_BINS)

    def percentile(self, percent: float) -> float:
        """Return the lower edge of the bin below whose end ``percent`` of all values lie."""
        rank = math.ceil(len(self) * percent / 100)
        index = int(np.searchsorted(np.cumsum(self._counts), max(rank, 1)))
        return 2.0 ** (index / _BINS_PER_OCTAVE)


@dataclass(slots=True)
class _Stays:
    ns: Histogram = field(default_factory=Histogram)
    steps: Histogram = field(default_factory=Histogram)


class WaitClock:
    """An observer of a pool that measures each block's stay in the two states that wait.

    Args:
        num_blocks: Size of the pool.
        now_ns: The clock.
    """

    def __init__(self, num_blocks: int, now_ns: Callable[[], int]) -> None:
        self.steps = 0
        """Steps up to now; whoever dispatches them counts."""
        self._now_ns = now_ns
        self._since_ns = np.zeros(num_blocks, dtype=np.int64)
        self._since_step = np.zeros(num_blocks, dtype=np.int64)
        self._fenced = _Stays()
        self._quarantined = _Stays()

    def moved(self, block_ids: BlockIds, old: BlockState, new: BlockState) -> None:
        """Take note of blocks that changed from ``old`` to ``new``."""
        left, entered = self._stays_in(old), self._stays_in(new)
        if left is None and entered is None:
            return
        now = self._now_ns()
        if left is not None:
            left.ns.add(now - self._since_ns[block_ids])
            left.steps.add(self.steps - self._since_step[block_ids])
        if entered is not None:
            self._since_ns[block_ids] = now
            self._since_step[block_ids] = self.steps

    def figures(self) -> Figures:
        """Return how many stays there were, and percentiles of their length."""
        found: Figures = {}
        for name, stays in (("fenced", self._fenced), ("quarantined", self._quarantined)):
            found[f"{name}_blocks"] = len(stays.ns)
            for percent in (50, 99) if len(stays.ns) else ():
                found[f"{name}_us_p{percent}"] = round(stays.ns.percentile(percent) / 1e3, 1)
                found[f"{name}_steps_p{percent}"] = round(stays.steps.percentile(percent), 1)
        return found

    def _stays_in(self, state: BlockState) -> _Stays | None:
        if state is BlockState.FENCED:
            return self._fenced
        return self._quarantined if state is BlockState.QUARANTINED else None
