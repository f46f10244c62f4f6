"""Blocks that can be handed out, least recently let go first."""

import numpy as np
from numpy.typing import NDArray

BlockIds = NDArray[np.int32]
_MIN_SCAN = 32


class BlockQueue:
    """A queue of distinct block ids that can lose any of them, all in batches.

    Removal marks an entry as stale, and reading skips stale entries, so the work is proportional
    to the blocks named (amortized over compactions, each of which follows at least as many
    appends as the pool has blocks).

    Invariants (``check_invariants``):
        * an entry is live if and only if ``place_of`` its block is the entry's own place;
        * the length is the number of live entries.
    """

    def __init__(self, num_blocks: int) -> None:
        self._entries = np.empty(2 * num_blocks, dtype=np.int32)
        self._place_of = np.full(num_blocks, -1, dtype=np.int64)
        self._head = 0
        self._tail = 0
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def append(self, block_ids: BlockIds) -> None:
        """Put ``block_ids``, none of them queued, at the end in their order."""
        if self._tail + len(block_ids) > len(self._entries):
            self._compact()
        tail = self._tail + len(block_ids)
        self._entries[self._tail : tail] = block_ids
        self._place_of[block_ids] = np.arange(self._tail, tail)
        self._tail = tail
        self._length += len(block_ids)

    def remove(self, block_ids: BlockIds) -> None:
        """Take ``block_ids``, all of them queued, out of the queue."""
        self._place_of[block_ids] = -1
        self._length -= len(block_ids)

    def first(self, count: int) -> BlockIds:
        """Return the first ``count`` ids, at most the length, in order. They stay queued."""
        found: list[BlockIds] = []
        at, missing = self._head, count
        while missing > 0:
            stop = min(at + max(missing, _MIN_SCAN), self._tail)
            places = self._live_places(at, stop)[:missing]
            if not found and len(places):
                self._head = int(places[0])
            if len(places):
                found.append(self._entries[places])
            missing -= len(places)
            at = stop
        return np.concatenate(found) if found else np.empty(0, dtype=np.int32)

    def check_invariants(self) -> None:
        """Assert the invariants above; the work is proportional to the pool."""
        places = self._live_places(self._head, self._tail)
        assert len(places) == self._length, "the queue's length is wrong"
        assert len(places) == np.count_nonzero(self._place_of >= 0), "a queued block is lost"

    def contains(self, block_ids: BlockIds) -> NDArray[np.bool_]:
        """Return, for each of ``block_ids``, whether it is queued."""
        return self._place_of[block_ids] >= 0

    def _live_places(self, start: int, stop: int) -> NDArray[np.int64]:
        places = np.arange(start, stop)
        return places[self._place_of[self._entries[start:stop]] == places]

    def _compact(self) -> None:
        live = self._entries[self._live_places(self._head, self._tail)]
        self._entries[: len(live)] = live
        self._place_of[live] = np.arange(len(live))
        self._head, self._tail = 0, len(live)
