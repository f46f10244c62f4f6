"""Which blocks a sliding window still needs: arithmetic only, in tokens and absolute indices.

The query at position ``q`` reads positions ``q - window + 1`` to ``q``, and the sinks:

    tokens   0 ........ s ................. q-w+1 ......... q
             [ sinks  ) [      holes      ) [   window      ]
    blocks   [0, sinks) [sinks, first live) [first live, ...)

With ``n`` settled tokens the earliest query that any step in flight or to come can ask is ``n``,
so nothing in front of ``n - window + 1`` is read again. Counting tokens in flight as settled
would release a block that the step in flight still reads.
"""

import numpy as np
from numpy.typing import NDArray

from core.kv_layout import KVGroup, KVLayout


def num_sink_blocks(group: KVGroup, block_size: int) -> int:
    """Leading blocks that are never behind the window."""
    return -(-group.num_sinks // block_size)


def first_live_block(group: KVGroup, block_size: int, num_settled_tokens: int) -> int:
    """First block that holds a token inside the window, sinks apart; 0 without a window."""
    if group.window is None:
        return 0
    return max(0, num_settled_tokens - group.window + 1) // block_size


def needed_blocks(group: KVGroup, block_size: int, num_settled_tokens: int) -> list[range]:
    """Runs of absolute indices that must be there when ``num_settled_tokens`` are, in order.

    Only blocks that hold settled tokens count. Runs do not overlap, and none is empty.
    """
    num_blocks = -(-num_settled_tokens // block_size)
    first = first_live_block(group, block_size, num_settled_tokens)
    num_sinks = num_sink_blocks(group, block_size)
    if first <= num_sinks:
        return [range(num_blocks)] if num_blocks else []
    runs = [range(min(num_sinks, num_blocks)), range(first, num_blocks)]
    return [run for run in runs if run]


def blocks_to_come(
    group: KVGroup, block_size: int, *, num_covered: int, num_tokens: int, num_unsettled: int
) -> int:
    """Return how many more blocks than now a sequence may hold at once on its way.

    Without a window that is what is not covered yet. With one, blocks come free while others come:
    what is held never exceeds the sinks, the window and the tokens that have not settled.

    Args:
        group: One KV group of the sequence.
        block_size: Tokens in a block.
        num_covered: Tokens that have room now; they may all have settled.
        num_tokens: Tokens that it is on its way to.
        num_unsettled: Tokens behind the settled ones that have room, at most.
    """
    rest = -(-num_tokens // block_size) - -(-num_covered // block_size)
    if group.window is None:
        return max(0, rest)
    reach = group.window - 1 + num_unsettled
    most = num_sink_blocks(group, block_size) + -(-reach // block_size) + 1
    held = sum(map(len, needed_blocks(group, block_size, num_covered)))
    return max(0, min(rest, most - held))


def next_change(layout: KVLayout, num_settled_tokens: int) -> int:
    """Return how many settled tokens first fill another block or leave one behind a window."""
    size = layout.block_size
    change = (num_settled_tokens // size + 1) * size
    for group in layout.groups:
        if group.window is not None:
            first = first_live_block(group, size, num_settled_tokens)
            change = min(change, (first + 1) * size + group.window - 1)
    return change


class WindowReach:
    """What a hit needs of one group with a window."""

    def __init__(self, index: int, group: KVGroup, block_size: int) -> None:
        self.index = index
        """Of the group."""
        self._group = group
        self._block_size = block_size
        self.num_sinks = num_sink_blocks(group, block_size)
        """Leading blocks that every hit needs."""

    def live(self, num_blocks: int) -> range:
        """Return the blocks that the window reaches back to from the end of ``num_blocks``."""
        first = first_live_block(self._group, self._block_size, num_blocks * self._block_size)
        return range(first, num_blocks)

    def usable_lengths(self, present: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Return for each number of blocks, from 1 on, whether a hit of that length is usable.

        Args:
            present: For each block, whether it is there.
        """
        indices = np.arange(len(present))
        last_hole = np.maximum.accumulate(np.where(present, -1, indices))
        lengths = indices + 1
        window = self._group.window or 0
        first_live = np.maximum(0, lengths * self._block_size - window + 1) // self._block_size
        holes = np.flatnonzero(~present)
        num_leading = int(holes[0]) if len(holes) else len(present)
        has_sinks = num_leading >= np.minimum(self.num_sinks, lengths)
        return (last_hole < first_live) & has_sinks
