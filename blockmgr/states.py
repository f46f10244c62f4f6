"""The states of a KV block, and what decides between them.

    FREE ──allocate──> ACTIVE ──lease──> LEASED          owned
     ^                   ^ │
     │   begin_receive ──│─│──> RECEIVING ──end_operation──> ACTIVE
     │                   │ │
     │                   │ └─ last owner lets go:
     │                   │      a step in flight may touch it ───────> FENCED
     │                   │      else an operation may touch it ──────> QUARANTINED
     │                   │      else its content is in the prefix tree ─> CACHED
     │                   │      else ────────────────────────────────> FREE
     │                   └──prefix hit── CACHED, FENCED, QUARANTINED
     └──evicted, reset── CACHED
        FENCED ──step retired──> QUARANTINED or CACHED or FREE
        QUARANTINED ──operation terminal──> CACHED or FREE

A state is never set: it follows from what holds the block (``Hold``), so that no order of events
can leave a block in a state that contradicts what may still touch it.

The holds of a block are counters packed into one 64-bit word, so that adding one to a thousand
blocks is one addition:

    bit 63  62    49 48    35 34    23 22       11 10     1 0
       0  | OWNER   | LEASE   | STEP   | OPERATION | WRITE  | CACHE
"""

from collections.abc import Collection, Sequence
from enum import IntEnum
from typing import Final

import numpy as np
from numpy.typing import NDArray


class BlockState(IntEnum):
    """Where a block is; exactly one at a time. The values index the pool's counts."""

    FREE = 0
    """Nobody owns it, nothing may touch it, its content is worth nothing."""
    CACHED = 1
    """Nobody owns it; a prefix can hit it, and allocation can evict it."""
    QUARANTINED = 2
    """Nobody owns it, no step may touch it, and a NIC or copy operation may."""
    FENCED = 3
    """Nobody owns it, and a dispatched step may touch it."""
    LEASED = 4
    """Promised to a reader, and no live request owns it."""
    ACTIVE = 5
    """A live request owns it."""
    RECEIVING = 6
    """Owned, and an operation may write it."""


class Hold(IntEnum):
    """What keeps a block from being FREE; each is counted per block. The least urgent first."""

    CACHE = 0
    """1 while the prefix tree knows its content."""
    WRITE = 1
    """Operations that may write it."""
    OPERATION = 2
    """NIC and copy operations that are not terminal, those of WRITE included."""
    STEP = 3
    """Deferred releases that wait for a step."""
    LEASE = 4
    """Leased requests that have it in a block table."""
    OWNER = 5
    """Live requests that have it in a block table."""


SHIFT_OF_HOLD: Final = (0, 1, 11, 23, 35, 49)
_WIDTH_OF_HOLD: Final = (1, 10, 12, 12, 14, 14)
UNIT_OF_HOLD: Final = tuple(1 << shift for shift in SHIFT_OF_HOLD)
"""One of each hold, by its value."""
MASK_OF_HOLD: Final = tuple(
    ((1 << width) - 1) << shift for shift, width in zip(SHIFT_OF_HOLD, _WIDTH_OF_HOLD, strict=True)
)
"""The bits of each hold, by its value; all set means that the counter is full."""


class HoldChange:
    """One of each of some holds more, and one of each of others less, for any number of blocks."""

    def __init__(self, *, add: Sequence[Hold] = (), drop: Sequence[Hold] = ()) -> None:
        self.add = tuple(add)
        self.drop = tuple(drop)
        self.delta = sum(UNIT_OF_HOLD[hold] for hold in add)
        """What a block's word changes by."""
        self.delta -= sum(UNIT_OF_HOLD[hold] for hold in drop)
        self._full = tuple([MASK_OF_HOLD[hold] for hold in add])
        self._needed = tuple([MASK_OF_HOLD[hold] for hold in drop])

    def is_droppable(self, word: int) -> bool:
        """Whether a block with these holds has all that is dropped."""
        for mask in self._needed:  # noqa: SIM110 - a generator costs more than the rest
            if not word & mask:
                return False
        return True

    def is_countable(self, word: int) -> bool:
        """Whether a block with these holds can count one more of all that is added."""
        for mask in self._full:  # noqa: SIM110 - as above
            if word & mask == mask:
                return False
        return True


_LEAST_WORDS: Final = np.array([UNIT_OF_HOLD[hold] for hold in Hold], dtype=np.int64)
_STATE_OF_TOP_HOLD: Final = np.array(
    [
        BlockState.FREE,
        BlockState.CACHED,
        BlockState.QUARANTINED,
        BlockState.QUARANTINED,
        BlockState.FENCED,
        BlockState.LEASED,
        BlockState.ACTIVE,
    ],
    dtype=np.int8,
)
_OWNED: Final = MASK_OF_HOLD[Hold.OWNER] | MASK_OF_HOLD[Hold.LEASE]
_WRITE: Final = MASK_OF_HOLD[Hold.WRITE]


def state_of(holds: Collection[Hold]) -> BlockState:
    """Return the state of a block that has at least one of each of ``holds``."""
    if Hold.OWNER in holds or Hold.LEASE in holds:
        if Hold.WRITE in holds:
            return BlockState.RECEIVING
        return BlockState.ACTIVE if Hold.OWNER in holds else BlockState.LEASED
    if Hold.STEP in holds:
        return BlockState.FENCED
    if Hold.OPERATION in holds or Hold.WRITE in holds:
        return BlockState.QUARANTINED
    return BlockState.CACHED if Hold.CACHE in holds else BlockState.FREE


def state_of_word(word: int) -> BlockState:
    """Return the state of a block whose packed holds are ``word``."""
    if word & _OWNED:
        if word & _WRITE:
            return BlockState.RECEIVING
        return BlockState.ACTIVE if word >= UNIT_OF_HOLD[Hold.OWNER] else BlockState.LEASED
    if word >= UNIT_OF_HOLD[Hold.STEP]:
        return BlockState.FENCED
    if word >= UNIT_OF_HOLD[Hold.WRITE]:
        return BlockState.QUARANTINED
    return BlockState.CACHED if word else BlockState.FREE


def states_of(words: NDArray[np.int64]) -> NDArray[np.int8]:
    """Return the state's value for each of many packed words."""
    # The most urgent hold is the top one, so the word's size alone tells it.
    states = _STATE_OF_TOP_HOLD[np.searchsorted(_LEAST_WORDS, words, side="right")]
    states[((words & _OWNED) != 0) & ((words & _WRITE) != 0)] = BlockState.RECEIVING
    return states
