"""How long blocks wait as FENCED or QUARANTINED, by a clock and in steps, in bounded memory."""

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from bench.figures import Figures
from blockmgr.free_queue import BlockIds
from blockmgr.states import BlockState

_BINS_PER_OCTAVE = 32
_NUM_BINS = 40 * _BINS_PER_OCTAVE
WAITING = (BlockState.FENCED, BlockState.QUARANTINED)


class Histogram:
    """Positive numbers in bins that are 2 % wide, from 1 to 2**40."""

    def __init__(self) -> None:
        self._counts: NDArray[np.int64] = np.zeros(_NUM_BINS, dtype=np.int64)

    def add(self, values: NDArray[np.float64]) -> None:
        """Count ``values``; those below 1 as 1."""
        bins = (_BINS_PER_OCTAVE * np.log2(np.maximum(values, 1.0))).astype(np.int64)
        self._counts += np.bincount(np.minimum(bins, _NUM_BINS - 1), minlength=_NUM_BINS)

    def __len__(self) -> int:
        return int(self._counts.sum())

    def percentile(self, percent: float) -> float:
        """Return the lower edge of the bin below whose end ``percent`` of all values lie."""
        rank = math.ceil(len(self) * percent / 100)
        index = int(np.searchsorted(np.cumsum(self._counts), max(rank, 1)))
        return 2.0 ** (index / _BINS_PER_OCTAVE)


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
        self._ns = {state: Histogram() for state in WAITING}
        self._steps = {state: Histogram() for state in WAITING}

    def moved(self, block_ids: BlockIds, old: BlockState, new: BlockState) -> None:
        """Take note of blocks that changed from ``old`` to ``new``."""
        if old not in self._ns and new not in self._ns:
            return
        now = self._now_ns()
        if old in self._ns:
            self._ns[old].add((now - self._since_ns[block_ids]).astype(np.float64))
            self._steps[old].add((self.steps - self._since_step[block_ids]).astype(np.float64))
        if new in self._ns:
            self._since_ns[block_ids] = now
            self._since_step[block_ids] = self.steps

    def figures(self) -> Figures:
        """Return how many stays there were, and percentiles of their length."""
        found: Figures = {}
        for state in WAITING:
            name = state.name.lower()
            found[f"{name}_blocks"] = len(self._ns[state])
            for percent in (50, 99) if len(self._ns[state]) else ():
                micros = self._ns[state].percentile(percent) / 1e3
                found[f"{name}_us_p{percent}"] = round(micros, 1)
                steps = round(self._steps[state].percentile(percent), 1)
                found[f"{name}_steps_p{percent}"] = steps
        return found
