"""The FREE blocks in the order in which they became free."""

from array import array

import numpy as np
from numpy.typing import NDArray

BlockIds = NDArray[np.int64]


class FreeQueue:
    """A ring of distinct block ids: appended at the tail, taken from the head, in slices.

    Invariant (``check_invariants``): no id is queued twice.
    """

    def __init__(self, num_blocks: int) -> None:
        # Two faces of one array: Python's for single blocks, numpy's for batches.
        self._ring_of_one = array("q", range(num_blocks))
        self._ring = np.frombuffer(self._ring_of_one, dtype=np.int64)
        self._head = 0
        self._length = num_blocks

    def __len__(self) -> int:
        return self._length

    def append(self, block_ids: BlockIds) -> None:
        """Put ``block_ids``, none of them queued, at the end in their order."""
        size = len(self._ring)
        tail = (self._head + self._length) % size
        num_first = min(len(block_ids), size - tail)
        self._ring[tail : tail + num_first] = block_ids[:num_first]
        self._ring[: len(block_ids) - num_first] = block_ids[num_first:]
        self._length += len(block_ids)

    def append_one(self, block_id: int) -> None:
        """Put ``block_id``, not queued, at the end."""
        self._ring_of_one[(self._head + self._length) % len(self._ring)] = block_id
        self._length += 1

    def take(self, count: int) -> BlockIds:
        """Remove and return the first ``count`` ids, at most the length, in order."""
        end = self._head + count
        block_ids = self._ring[self._head : end].copy()
        if end > len(self._ring):
            block_ids = np.concatenate((block_ids, self._ring[: end - len(self._ring)]))
        self._head = end % len(self._ring)
        self._length -= count
        return block_ids

    def take_one(self) -> int:
        """Remove and return the first id; the queue is not empty."""
        block_id = self._ring_of_one[self._head]
        self._head = (self._head + 1) % len(self._ring_of_one)
        self._length -= 1
        return block_id

    @property
    def block_ids(self) -> BlockIds:
        """All queued ids, in order."""
        return np.roll(self._ring, -self._head)[: self._length]

    def check_invariants(self) -> None:
        """Assert the invariant above."""
        assert len(np.unique(self.block_ids)) == self._length, "a free block is queued twice"
