"""Where one owner's tokens live in one KV group."""

from array import array
from typing import Final

import numpy as np
from numpy.typing import NDArray

from blockmgr.free_queue import BlockIds
from blockmgr.window import first_live_block, num_sink_blocks
from core.kv_layout import KVGroup

HOLE: Final = -1
"""Entry of a position that has no block: behind a sliding window, or not received."""
_NO_ENTRIES: Final = np.empty(0, dtype=np.int64)


class BlockTable:
    """Block ids by absolute block index, with explicit holes.

    A group without a window has no hole once it is covered. With one, everything between the
    sinks and ``first_live`` is a hole for good, and ``first_live`` only grows.
    """

    def __init__(self, group: KVGroup, block_size: int) -> None:
        self.group = group
        self.first_live = num_sink_blocks(group, block_size)
        self._block_size = block_size
        self._entries = _NO_ENTRIES
        self.num_blocks = 0
        """Indices that are covered, holes included."""
        self._num_held = 0

    def __len__(self) -> int:
        return self.num_blocks

    @property
    def entries(self) -> BlockIds:
        """A view on ids and holes by absolute index."""
        return self._entries[: self.num_blocks]

    @property
    def held(self) -> BlockIds:
        """The block ids without holes, in order of position."""
        entries = self.entries
        return entries if self._num_held == self.num_blocks else entries[entries != HOLE]

    def block_at(self, index: int) -> int:
        """Return the id or hole at ``index``, which is covered."""
        return int(self._entries[index])

    def column(self, indices: range) -> "array[int]":
        """Return ids and holes at ``indices``, all of them covered."""
        return array("q", self._entries[indices.start : indices.stop].tobytes())

    def held_in(self, indices: slice) -> BlockIds:
        """The block ids at ``indices``, without holes."""
        entries = self.entries[indices]
        return entries[entries != HOLE]

    @property
    def num_covered_blocks(self) -> int:
        """Blocks from the start that need no more allocation."""
        if self.group.window is not None or self._num_held == self.num_blocks:
            return self.num_blocks
        return int(np.argmax(self.entries == HOLE))

    def missing(self, num_blocks: int) -> range | list[int]:
        """Absolute indices to fill so that the first ``num_blocks`` are covered.

        Holes of a group with a window stay holes: what was skipped lies behind the window.
        """
        added = range(self.num_blocks, num_blocks)
        if self.group.window is not None or self._num_held == self.num_blocks:
            return added
        return [*np.flatnonzero(self.entries[:num_blocks] == HOLE).tolist(), *added]

    def has_lost_any(self, indices: range) -> bool:
        """Whether one of ``indices`` lost its block to the window for good."""
        num_sinks = num_sink_blocks(self.group, self._block_size)
        first, last = max(indices.start, num_sinks), min(indices.stop, self.first_live)
        return self.group.window is not None and first < last

    def entries_at(self, indices: range) -> BlockIds:
        """Return a copy of the ids and holes at ``indices``, which may go beyond the end."""
        found = np.full(len(indices), HOLE, dtype=np.int64)
        known = self.entries[indices.start : indices.stop]
        found[: len(known)] = known
        return found

    def put(self, indices: range | list[int], block_ids: BlockIds) -> None:
        """Set the entries at ``indices``, all of them holes or behind the end, ascending."""
        if not len(indices):
            return
        self._reserve(indices[-1] + 1)
        if isinstance(indices, range):
            self._entries[indices.start : indices.stop] = block_ids
        else:
            self._entries[np.asarray(indices)] = block_ids
        self._num_held += len(indices)

    def put_new(self, first_index: int, block_ids: BlockIds, is_new: NDArray[np.bool_]) -> None:
        """Set the entries from ``first_index`` on that are new; the others are there already."""
        if is_new.all():
            self.put(range(first_index, first_index + len(block_ids)), block_ids)
        else:
            self.put((np.flatnonzero(is_new) + first_index).tolist(), block_ids[is_new])

    def append(self, block_id: int) -> None:
        """Put one block behind the end."""
        if self.num_blocks == len(self._entries):
            self._reserve(self.num_blocks + 1)
            self.num_blocks -= 1
        self._entries[self.num_blocks] = block_id
        self.num_blocks += 1
        self._num_held += 1

    def skip(self, num_settled_tokens: int) -> None:
        """Cover ``num_settled_tokens`` in a table that holds just what the window needs of them."""
        self._reserve(-(-num_settled_tokens // self._block_size))
        first = first_live_block(self.group, self._block_size, num_settled_tokens)
        self.first_live = max(self.first_live, first)

    def prune(self, num_settled_tokens: int) -> BlockIds:
        """Make holes of all blocks behind the window; return those that were there, in order."""
        first = first_live_block(self.group, self._block_size, num_settled_tokens)
        first = min(first, self.num_blocks)
        if first <= self.first_live:
            return self._entries[:0]
        gone = self._entries[self.first_live : first]
        block_ids = gone[gone != HOLE]
        gone[:] = HOLE
        self.first_live = first
        self._num_held -= len(block_ids)
        return block_ids

    def check_invariants(self) -> None:
        """Assert that what is held is counted, and that what a window left behind stays a hole."""
        assert self._num_held == len(self.held), "the number of held blocks is wrong"
        num_sinks = num_sink_blocks(self.group, self._block_size)
        assert (self.entries[num_sinks : self.first_live] == HOLE).all(), "a pruned block is back"

    def make_room(self, num_blocks: int) -> None:
        """Have room for ``num_blocks`` and some growth, so that no put has to make it."""
        if num_blocks > len(self._entries):
            grown = np.empty(num_blocks + max(8, num_blocks // 4), dtype=np.int64)
            grown[: self.num_blocks] = self.entries
            grown[self.num_blocks :] = HOLE
            self._entries = grown

    def _reserve(self, length: int) -> None:
        self.make_room(length)
        self.num_blocks = max(self.num_blocks, length)
