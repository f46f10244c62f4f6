"""The blocks of one worker: what holds each of them, its state and its generation."""

from array import array
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from blockmgr.free_queue import BlockIds, FreeQueue
from blockmgr.states import (
    MASK_OF_HOLD,
    SHIFT_OF_HOLD,
    UNIT_OF_HOLD,
    BlockState,
    Hold,
    HoldChange,
    state_of_word,
    states_of,
)
from core.errors import DoubleReleaseError, InternalError
from core.ids import BlockId

_CACHED_WORD = UNIT_OF_HOLD[Hold.CACHE]
_OWNED_WORD = UNIT_OF_HOLD[Hold.OWNER]
_OPERATIONS = MASK_OF_HOLD[Hold.OPERATION] | MASK_OF_HOLD[Hold.WRITE]


class BlockObserver(Protocol):
    """Told of every change of state: one call per pair of states of a batch."""

    def moved(self, block_ids: BlockIds, old: BlockState, new: BlockState) -> None:
        """``block_ids`` went from ``old`` to ``new``; the pool's books are consistent."""
        ...


class CachedListener(Protocol):
    """Told, before any observer, which blocks can be evicted."""

    def became_cached(self, block_ids: BlockIds) -> None:
        """``block_ids`` are CACHED as of now."""
        ...

    def left_cached(self, block_ids: BlockIds) -> None:
        """``block_ids`` are not CACHED any more."""
        ...


class _NobodyListens:
    """Until a prefix tree is there."""

    def became_cached(self, block_ids: BlockIds) -> None:
        """Do nothing."""

    def left_cached(self, block_ids: BlockIds) -> None:
        """Do nothing."""


class BlockPool:
    """Counts what holds each block, and hands out blocks that nothing holds.

    Every change is a batch over distinct blocks, and a block moves straight to the state that the
    holds after the change give it, in the order of the batch. The work is proportional to the
    blocks named; a single block costs no array operation.

    Invariants (``check_invariants``):
        * no hold is negative, and the counts are those of the states that the holds give;
        * exactly the FREE blocks are in the free queue.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.observers: Sequence[BlockObserver] = ()
        self.cached_listener: CachedListener = _NobodyListens()
        # Each array has two faces: Python's for single blocks, numpy's for batches.
        self._word_of = array("q", bytes(8 * num_blocks))
        self._words = np.frombuffer(self._word_of, dtype=np.int64)
        self._generation_of = array("q", bytes(8 * num_blocks))
        self._generations = np.frombuffer(self._generation_of, dtype=np.int64)
        self._counts = [0] * len(BlockState)
        self._counts[BlockState.FREE] = num_blocks
        self._free = FreeQueue(num_blocks)

    # Questions

    def count(self, state: BlockState) -> int:
        """Blocks in ``state``."""
        return self._counts[state]

    @property
    def num_free(self) -> int:
        """Blocks that ``allocate`` can hand out now."""
        return len(self._free)

    @property
    def num_allocatable(self) -> int:
        """Blocks that are FREE, or CACHED and so evictable."""
        return len(self._free) + self._counts[BlockState.CACHED]

    @property
    def num_withheld(self) -> int:
        """Blocks that nobody owns and something may still touch."""
        return self._counts[BlockState.FENCED] + self._counts[BlockState.QUARANTINED]

    def state(self, block_id: BlockId) -> BlockState:
        """Return the state of one block."""
        return state_of_word(self._word_of[block_id])

    def holds(self, hold: Hold, block_ids: BlockIds) -> NDArray[np.int64]:
        """Return how many of ``hold`` each of ``block_ids`` has."""
        return (self._words[block_ids] & MASK_OF_HOLD[hold]) >> SHIFT_OF_HOLD[hold]

    def is_cached(self, block_ids: BlockIds) -> NDArray[np.bool_]:
        """Return, for each of ``block_ids``, whether it is CACHED."""
        return self._words[block_ids] == _CACHED_WORD

    def is_one_cached(self, block_id: int) -> bool:
        """Whether this block is CACHED."""
        return self._word_of[block_id] == _CACHED_WORD

    def are_unshared(self, block_ids: BlockIds) -> bool:
        """Whether each has one owner, and nothing else holds it but operations."""
        return bool((self._words[block_ids] & ~_OPERATIONS == _OWNED_WORD).all())

    def cached(self) -> BlockIds:
        """Return all CACHED blocks; the work is proportional to the pool."""
        return np.flatnonzero(self._words == _CACHED_WORD)

    def generations(self, block_ids: BlockIds) -> NDArray[np.int64]:
        """Return how often each of ``block_ids`` has been allocated."""
        return self._generations[block_ids]

    # Changes

    def allocate(self, count: int, *holds: Hold) -> BlockIds:
        """Give the ``count`` (at most ``num_free``) blocks that are free longest ``holds``.

        Each gets a new generation.

        Returns:
            The blocks in ascending order, because adjacent ones travel as one descriptor.
        """
        word = sum(UNIT_OF_HOLD[hold] for hold in holds)
        block_ids = np.sort(self._free.take(count))
        self._words[block_ids] = word
        self._generations[block_ids] += 1
        self._moved(block_ids, BlockState.FREE, state_of_word(word))
        return block_ids

    def allocate_one(self) -> int:
        """Give the block that is free longest an owner; ``num_free`` is not 0."""
        block_id = self._free.take_one()
        self._word_of[block_id] = _OWNED_WORD
        self._generation_of[block_id] += 1
        counts = self._counts
        counts[BlockState.FREE] -= 1
        counts[BlockState.ACTIVE] += 1
        if self.observers:
            self._tell(np.array([block_id], dtype=np.int64), BlockState.FREE, BlockState.ACTIVE)
        return block_id

    def evict_one(self, block_id: int) -> None:
        """Free a CACHED block that left the prefix tree."""
        self._word_of[block_id] = 0
        self._free.append_one(block_id)
        counts = self._counts
        counts[BlockState.CACHED] -= 1
        counts[BlockState.FREE] += 1
        if self.observers:
            self._tell(np.array([block_id], dtype=np.int64), BlockState.CACHED, BlockState.FREE)

    def keep(self, block_ids: BlockIds) -> None:
        """Give owned blocks that the prefix tree did not know its hold: no state changes."""
        self._words[block_ids] |= _CACHED_WORD

    def keep_one(self, block_id: int) -> None:
        """Do the same for a single block."""
        self._word_of[block_id] |= _CACHED_WORD

    def change(self, block_ids: BlockIds, change: HoldChange) -> None:
        """Apply ``change`` to every block.

        Raises:
            DoubleReleaseError: some blocks, all named, do not have a hold to drop. They were left
                alone; all others were changed.
            InternalError: a counter of some blocks is full. Nothing was changed.
        """
        absent: list[int] = []
        for same, word in _by_word(block_ids, self._words[block_ids], change):
            if change.is_droppable(word):
                self._change_equal(same, word, word + change.delta)
            else:
                absent += same.tolist()
        if absent:
            names = "+".join(hold.name for hold in change.drop)
            raise DoubleReleaseError(f"blocks {absent} have no {names} to drop")

    def _change_equal(self, block_ids: BlockIds, word: int, new_word: int) -> None:
        """Change blocks that all have ``word``."""
        self._words[block_ids] = new_word
        old, new = state_of_word(word), state_of_word(new_word)
        if old is new:
            return
        if new is BlockState.FREE:
            self._free.append(block_ids)
        self._moved(block_ids, old, new)

    def _moved(self, block_ids: BlockIds, old: BlockState, new: BlockState) -> None:
        self._counts[old] -= len(block_ids)
        self._counts[new] += len(block_ids)
        if new is BlockState.CACHED:
            self.cached_listener.became_cached(block_ids)
        elif old is BlockState.CACHED:
            self.cached_listener.left_cached(block_ids)
        if self.observers:
            self._tell(block_ids, old, new)

    def _tell(self, block_ids: BlockIds, old: BlockState, new: BlockState) -> None:
        for observer in self.observers:
            observer.moved(block_ids, old, new)

    def check_invariants(self, expected_words: NDArray[np.int64]) -> None:
        """Assert the invariants above, and that the packed holds are ``expected_words``."""
        for hold in Hold:
            wrong = np.flatnonzero((self._words ^ expected_words) & MASK_OF_HOLD[hold])
            assert not len(wrong), f"blocks {wrong.tolist()} have wrong {hold.name} counts"
        states = states_of(self._words)
        assert np.bincount(states, minlength=len(BlockState)).tolist() == self._counts
        self._free.check_invariants()
        free = np.flatnonzero(states == BlockState.FREE)
        assert np.array_equal(np.sort(self._free.block_ids), free), "FREE blocks are not queued"


def _by_word(
    block_ids: BlockIds, words: NDArray[np.int64], change: HoldChange
) -> list[tuple[BlockIds, int]]:
    """Split a batch into blocks with equal words, each in the order of the batch.

    Few words differ in a batch, and those that become FREE or CACHED never do: so the order of the
    batch is kept where it matters.

    Raises:
        InternalError: a counter that ``change`` adds to is full.
    """
    split: list[tuple[BlockIds, int]] = []
    while len(block_ids):
        word = int(words[0])
        if not change.is_countable(word):
            names = "+".join(hold.name for hold in change.add)
            full = block_ids[words == word].tolist()
            raise InternalError(f"blocks {full} have as many {names} as can be counted")
        is_same = words == word
        if np.count_nonzero(is_same) == len(words):
            split.append((block_ids, word))
            break
        split.append((block_ids[is_same], word))
        block_ids, words = block_ids[~is_same], words[~is_same]
    return split
