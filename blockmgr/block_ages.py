"""How long blocks live, idle in the cache, and are withheld from reuse."""

from collections.abc import Callable
from typing import Final

import numpy as np

from blockmgr.free_queue import BlockIds
from blockmgr.sampled_histogram import SampledHistogram
from blockmgr.states import BlockState

LIFETIME_S: Final = (0.1, 0.5, 1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3600.0, 14400.0)
WITHHELD_S: Final = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
WITHHELD: Final = (BlockState.FENCED, BlockState.QUARANTINED)
_NEVER: Final = np.inf


class BlockAges:
    """Times every block's moves by the caller's clock; a ``BlockObserver``.

    Durations are those of a sample of each batch, weighted to stand for all of it; which blocks
    are in which state since when is exact.

    Args:
        num_blocks: Of the pool.
        clock: Seconds that never go back.
    """

    def __init__(self, num_blocks: int, *, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._allocated_at = np.full(num_blocks, _NEVER)
        self._cached_at = np.full(num_blocks, _NEVER)
        self._withheld_at = {state: np.full(num_blocks, _NEVER) for state in WITHHELD}
        self.lifetimes = SampledHistogram(LIFETIME_S)
        """From allocation until FREE."""
        self.idle_times = SampledHistogram(LIFETIME_S)
        """From CACHED until evicted or reset."""
        self.withheld_times = {state: SampledHistogram(WITHHELD_S) for state in WITHHELD}
        """From entering FENCED or QUARANTINED until leaving it."""

    def moved(self, block_ids: BlockIds, old: BlockState, new: BlockState) -> None:
        """See ``BlockObserver``."""
        now = self._clock()
        at = block_ids.astype(np.intp, copy=False)  # by which numpy indexes fastest
        if old is BlockState.FREE:
            self._allocated_at[at] = now
        elif old is BlockState.FENCED or old is BlockState.QUARANTINED:
            withheld_at = self._withheld_at[old]
            self.withheld_times[old].observe(withheld_at, at, now)
            withheld_at[at] = _NEVER
        if new is BlockState.FREE:
            if old is BlockState.CACHED:
                self.idle_times.observe(self._cached_at, at, now)
            self.lifetimes.observe(self._allocated_at, at, now)
            self._allocated_at[at] = _NEVER
        elif new is BlockState.CACHED:
            self._cached_at[at] = now
        elif new is BlockState.FENCED or new is BlockState.QUARANTINED:
            self._withheld_at[new][at] = now

    def now(self) -> float:
        """Return the time by which moves are stamped."""
        return self._clock()

    def has_older_than(self, time: float) -> bool:
        """Whether a block is not FREE and was allocated at ``time`` or before."""
        return bool((self._allocated_at <= time).any())

    def oldest_withheld_s(self, state: BlockState) -> float:
        """Return for how long some block has been in ``state``, FENCED or QUARANTINED; 0: none."""
        since = float(self._withheld_at[state].min())
        return 0.0 if since == _NEVER else max(0.0, self._clock() - since)
