"""The blocks of one worker: what holds each of them, its state and its generation."""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from blockmgr.block_queue import BlockIds, BlockQueue
from blockmgr.states import STATE_OF_HOLDS, BlockState, Hold
from core.errors import DoubleReleaseError
from core.ids import BlockId

BlockHook = Callable[[Sequence[BlockId]], None]
_BITS = (1 << np.arange(len(Hold))).astype(np.int64)


class BlockPool:
    """Counts what holds each block, and hands out blocks that nothing holds.

    Every change is a batch over distinct blocks, and a block moves straight to the state that the
    holds after the change give it, in the order of the batch.

    Invariants (``check_invariants``):
        * each block's state is that of its holds, and the counts are those of the states;
        * no hold is negative;
        * exactly the FREE blocks are in the free queue, exactly the CACHED in the cached queue.
    """

    def __init__(
        self,
        num_blocks: int,
        *,
        on_free: BlockHook | None = None,
        on_allocate: BlockHook | None = None,
    ) -> None:
        self.num_blocks = num_blocks
        self._holds = np.zeros((len(Hold), num_blocks), dtype=np.int32)
        self._states = np.full(num_blocks, BlockState.FREE.value, dtype=np.int8)
        self._counts = np.zeros(len(BlockState), dtype=np.int64)
        self._counts[BlockState.FREE.value] = num_blocks
        self._generations = np.zeros(num_blocks, dtype=np.int64)
        self._free = BlockQueue(num_blocks)
        self._free.append(np.arange(num_blocks, dtype=np.int32))
        self._cached = BlockQueue(num_blocks)
        self._on_free = on_free
        self._on_allocate = on_allocate

    def count(self, state: BlockState) -> int:
        """Blocks in ``state``."""
        return int(self._counts[state.value])

    @property
    def num_allocatable(self) -> int:
        """Blocks that ``allocate`` can hand out now."""
        return len(self._free) + len(self._cached)

    @property
    def num_withheld(self) -> int:
        """Blocks that nobody owns and something may still touch."""
        return self.count(BlockState.FENCED) + self.count(BlockState.QUARANTINED)

    def count_in(self, block_ids: BlockIds, state: BlockState) -> int:
        """How many of ``block_ids`` are in ``state``."""
        return int(np.count_nonzero(self._states[block_ids] == state.value))

    def holds(self, hold: Hold, block_ids: BlockIds) -> NDArray[np.int32]:
        """Return how many of ``hold`` each of ``block_ids`` has."""
        return self._holds[hold, block_ids]

    def state(self, block_id: BlockId) -> BlockState:
        """Return the state of one block."""
        return BlockState(int(self._states[block_id]))

    def generations(self, block_ids: BlockIds) -> NDArray[np.int64]:
        """Return how often each of ``block_ids`` has been allocated."""
        return self._generations[block_ids]

    def allocate(self, count: int, holds: Sequence[Hold]) -> tuple[BlockIds, BlockIds]:
        """Give ``count`` (at most ``num_allocatable``) blocks a new generation and ``holds``.

        FREE blocks go first, then CACHED ones, the least recently let go of each.

        Returns:
            The blocks in ascending order, because adjacent ones travel as one descriptor; and
            those among them that were CACHED, which the prefix cache must forget.
        """
        free = self._free.first(min(count, len(self._free)))
        evicted = self._cached.first(count - len(free))
        block_ids = np.sort(np.concatenate((free, evicted)))
        self._generations[block_ids] += 1
        self._holds[Hold.CACHE, evicted] = 0
        self.change(block_ids, add=holds)
        if self._on_allocate is not None and len(free):
            self._on_allocate(_as_ids(free))
        return block_ids, evicted

    def change(
        self, block_ids: BlockIds, *, add: Sequence[Hold] = (), drop: Sequence[Hold] = ()
    ) -> None:
        """Add one of each hold in ``add`` to every block, and drop one of each in ``drop``.

        Raises:
            DoubleReleaseError: a block does not have a hold to drop. Nothing was changed.
        """
        for hold in drop:
            absent = block_ids[self._holds[hold, block_ids] < 1]
            if len(absent):
                raise DoubleReleaseError(f"blocks {absent.tolist()} have no {hold.name} to drop")
        for hold in drop:
            self._holds[hold, block_ids] -= 1
        for hold in add:
            self._holds[hold, block_ids] += 1
        self._move(block_ids)

    def _move(self, block_ids: BlockIds) -> None:
        """Bring states, counts and queues in line with the holds of ``block_ids``."""
        new = STATE_OF_HOLDS[_BITS @ (self._holds[:, block_ids] > 0)]
        changed = np.flatnonzero(new != self._states[block_ids])
        if not len(changed):
            return
        block_ids, new = block_ids[changed], new[changed]
        old = self._states[block_ids]
        self._states[block_ids] = new
        self._counts += np.bincount(new, minlength=len(BlockState))
        self._counts -= np.bincount(old, minlength=len(BlockState))
        for state, queue in ((BlockState.FREE, self._free), (BlockState.CACHED, self._cached)):
            queue.remove(block_ids[old == state.value])
            queue.append(block_ids[new == state.value])
        freed = block_ids[new == BlockState.FREE.value]
        if self._on_free is not None and len(freed):
            self._on_free(_as_ids(freed))

    def check_invariants(self, expected_holds: NDArray[np.int32]) -> None:
        """Assert the invariants above, and that the holds are ``expected_holds`` [hold, block]."""
        assert (self._holds >= 0).all(), "a hold is negative"
        for hold in Hold:
            wrong = np.flatnonzero(self._holds[hold] != expected_holds[hold])
            assert not len(wrong), f"blocks {wrong.tolist()} have wrong {hold.name} counts"
        states = STATE_OF_HOLDS[_BITS @ (self._holds > 0)]
        assert (states == self._states).all(), "a state contradicts the holds"
        assert (np.bincount(states, minlength=len(BlockState)) == self._counts).all()
        all_ids = np.arange(self.num_blocks, dtype=np.int32)
        for state, queue in ((BlockState.FREE, self._free), (BlockState.CACHED, self._cached)):
            queue.check_invariants()
            assert (queue.contains(all_ids) == (states == state.value)).all(), state


def _as_ids(block_ids: BlockIds) -> list[BlockId]:
    return [BlockId(block_id) for block_id in block_ids.tolist()]
