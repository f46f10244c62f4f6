"""How far a hit of the pool goes on in a lower tier, with windows."""

from collections.abc import Callable, Iterator

from blockmgr.window import first_live_block, needed_blocks, num_sink_blocks
from core.kv_layout import KVGroup, KVLayout

HasBlock = Callable[[int, int], bool]
"""Whether the tier has the block of (group, absolute index)."""


def usable_blocks(layout: KVLayout, first: int, last: int, has: HasBlock) -> int:
    """Return the largest n in [first, last] whose needed blocks from ``first`` on the tier has.

    The pool has a usable hit of ``first`` blocks, so it has what is needed in front of it: a
    window's start only moves forward.
    """
    full = [at for at, group in enumerate(layout.groups) if group.window is None]
    end = first
    while end < last and all(has(group, end) for group in full):
        end += 1
    windowed = [
        _WindowRuns(group, layout.block_size, range(first, end), has, at)
        for at, group in enumerate(layout.groups)
        if group.window is not None
    ]
    while end > first and not all(runs.cover(end) for runs in windowed):
        end -= 1
    return end


def blocks_to_load(layout: KVLayout, first: int, end: int) -> Iterator[tuple[int, range]]:
    """Yield, per group, the runs from ``first`` on that a hit of ``end`` blocks needs."""
    size = layout.block_size
    for at, group in enumerate(layout.groups):
        for run in needed_blocks(group, size, end * size):
            part = range(max(run.start, first), run.stop)
            if part:
                yield at, part


class _WindowRuns:
    """Runs of present blocks of one group, so that each candidate end costs one look."""

    def __init__(
        self, group: KVGroup, block_size: int, indices: range, has: HasBlock, at: int
    ) -> None:
        self._group = group
        self._block_size = block_size
        self._first = indices.start
        self._num_sinks = num_sink_blocks(group, block_size)
        self._run_start: list[int] = []
        """Per index: the first block of the run of present blocks that ends with it."""
        start = indices.start
        for index in indices:
            if not has(at, index):
                start = index + 1
            self._run_start.append(start)
        self._num_present_sinks = indices.start
        while self._num_present_sinks in indices and has(at, self._num_present_sinks):
            self._num_present_sinks += 1

    def cover(self, end: int) -> bool:
        """Whether all that ``end`` blocks need from the first index on is there."""
        live = first_live_block(self._group, self._block_size, end * self._block_size)
        sinks = min(self._num_sinks, end)
        start = self._run_start[end - 1 - self._first]
        return start <= max(live, self._first) and self._num_present_sinks >= sinks
