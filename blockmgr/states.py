"""The states of a KV block, and what decides between them.

    FREE ──allocate──> ACTIVE ──lease──> LEASED          owned
     ^                   ^ │
     │   begin_receive ──│─│──> RECEIVING ──end_operation──> ACTIVE
     │                   │ │
     │                   │ └─ last owner lets go:
     │                   │      a step in flight may touch it ───────> FENCED
     │                   │      else an operation may touch it ──────> QUARANTINED
     │                   │      else its content is in the prefix cache ─> CACHED
     │                   │      else ────────────────────────────────> FREE
     │                   └──prefix hit── CACHED, FENCED, QUARANTINED
     └──evicted, reset── CACHED
        FENCED ──step retired──> QUARANTINED or CACHED or FREE
        QUARANTINED ──operation terminal──> CACHED or FREE

A state is never set: it follows from what holds the block (``Hold``), so that no order of events
can leave a block in a state that contradicts what may still touch it.
"""

from collections.abc import Collection
from enum import Enum, IntEnum
from typing import Final

import numpy as np
from numpy.typing import NDArray


class BlockState(Enum):
    """Where a block is; exactly one at a time. The values index the pool's counts."""

    FREE = 0
    """Nobody owns it, nothing may touch it, its content is worth nothing."""
    ACTIVE = 1
    """A live request owns it."""
    RECEIVING = 2
    """Owned, and an operation may write it."""
    CACHED = 3
    """Nobody owns it; a prefix can hit it, and allocation can evict it."""
    FENCED = 4
    """Nobody owns it, and a dispatched step may touch it."""
    QUARANTINED = 5
    """Nobody owns it, no step may touch it, and a NIC or copy operation may."""
    LEASED = 6
    """Promised to a reader, and no live request owns it."""


class Hold(IntEnum):
    """What keeps a block from being FREE; each is counted per block. The values index arrays."""

    OWNER = 0
    """Live requests that have it in a block table."""
    LEASE = 1
    """Leased requests that have it in a block table."""
    STEP = 2
    """Deferred releases that wait for a step."""
    OPERATION = 3
    """NIC and copy operations that are not terminal, those of WRITE included."""
    WRITE = 4
    """Operations that may write it."""
    CACHE = 5
    """1 while the prefix cache knows its content."""


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


STATE_OF_HOLDS: Final[NDArray[np.int8]] = np.array(
    [state_of([hold for hold in Hold if bits >> hold & 1]).value for bits in range(1 << len(Hold))],
    dtype=np.int8,
)
"""State value by bit set of holds: the function above for whole arrays."""
