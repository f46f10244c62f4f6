"""Catches whoever writes a block that nobody owns: FREE blocks hold a pattern, which is verified.

For tests and for hunting a bug: it costs a write and a read of every block per life.
"""

from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from blockmgr.free_queue import BlockIds
from blockmgr.history import BlockHistory
from blockmgr.states import BlockState
from core.errors import MemoryCorruptionError
from core.ids import BlockId

Words = NDArray[np.int32]
_ALL_BYTES: Final = 0x01010101


class PoisonableMemory(Protocol):
    """The bytes of the pool. A call sees all earlier ones, and what follows it comes after it."""

    @property
    def num_blocks(self) -> int:
        """Blocks of the pool."""
        ...

    def fill_words(self, block_ids: BlockIds, words: Words) -> None:
        """Repeat ``words[i]`` over all of block ``block_ids[i]``."""
        ...

    def find_other_word(self, block_ids: BlockIds, words: Words) -> tuple[int, int] | None:
        """Return the first ``i`` whose block is not all ``words[i]``, and the offset in bytes."""
        ...


class Poison:
    """Fills blocks when they become FREE and verifies them when they are allocated.

    A ``BlockObserver``. Only FREE blocks are poisoned: a QUARANTINED one may still be read by a
    copy, which needs its bytes, or written by a read, which must not be taken for a stale one. It
    is poisoned when its last operation is terminal, so whatever is written after "terminal" was
    reported is caught. For the same reason poison needs step fences: without them a FREE block
    may rightly be written by a step in flight.

    The pattern differs by pool, block and generation, and reads as small finite numbers in every
    KV type, because attention multiplies what it masks by zero.

    Args:
        num_blocks: Of the pool; all FREE now, and filled at once.
        memory: Their bytes.
        history: Who is named when a block was written.
        seed: Of this pool, so that bytes copied from another pool's free block are no match.
    """

    def __init__(
        self, num_blocks: int, memory: PoisonableMemory, history: BlockHistory, *, seed: int
    ) -> None:
        self._memory = memory
        self._history = history
        self._seed = np.uint64(seed & 0xFFFFFFFF)
        self._generations = np.zeros(num_blocks, dtype=np.int64)
        self.num_verified = 0
        """Blocks whose poison was found whole."""
        self._fill(np.arange(num_blocks))

    def moved(self, block_ids: BlockIds, old: BlockState, new: BlockState) -> None:
        """See ``BlockObserver``.

        Raises:
            MemoryCorruptionError: a block was written while it was FREE.
        """
        if old is BlockState.FREE:
            self._verify(block_ids)
            self._generations[block_ids] += 1
        elif new is BlockState.FREE:
            self._fill(block_ids)

    def _fill(self, block_ids: BlockIds) -> None:
        self._memory.fill_words(block_ids, self._words(block_ids))

    def _verify(self, block_ids: BlockIds) -> None:
        found = self._memory.find_other_word(block_ids, self._words(block_ids))
        if found is not None:
            index, offset = found
            block_id = BlockId(int(block_ids[index]))
            raise MemoryCorruptionError(
                f"a stale writer wrote block={block_id} generation={self._generations[block_id]} "
                f"at offset={offset} after it was free; {self._history.describe(block_id)}"
            )
        self.num_verified += len(block_ids)

    def _words(self, block_ids: BlockIds) -> Words:
        """Return each block's pattern: four bytes of 0x20 to 0x3f, mixed from all that it names.

        Source: the finalizer of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014).
        """
        mixed = self._generations[block_ids].astype(np.uint64) << np.uint64(32)
        mixed ^= block_ids.astype(np.uint64) ^ (self._seed << np.uint64(20))
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
        mixed ^= mixed >> np.uint64(31)
        low = mixed.astype(np.uint32) & np.uint32(0x1F * _ALL_BYTES)
        return (low | np.uint32(0x20 * _ALL_BYTES)).view(np.int32)
