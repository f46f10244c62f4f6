"""Recounts what must hold each block, from everything that can hold one."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from blockmgr.fences import PendingOperation
from blockmgr.free_queue import BlockIds
from blockmgr.holding import Holding
from blockmgr.states import UNIT_OF_HOLD, Hold


def expected_words(
    num_blocks: int,
    *,
    holdings: Sequence[Holding],
    deferred: Sequence[BlockIds],
    pending: Sequence[PendingOperation],
    cached: BlockIds,
) -> NDArray[np.int64]:
    """Return the packed holds [block] that these holders amount to."""
    expected = np.zeros(num_blocks, dtype=np.int64)
    for holding in holdings:
        kind = Hold.LEASE if holding.is_lease else Hold.OWNER
        block_ids = holding.release_order
        assert len(np.unique(block_ids)) == len(block_ids), f"{holding.owner} has a block twice"
        expected[block_ids] += UNIT_OF_HOLD[kind]
    for block_ids in deferred:
        expected[block_ids] += UNIT_OF_HOLD[Hold.STEP]
    for operation in pending:
        expected[operation.block_ids] += UNIT_OF_HOLD[Hold.OPERATION]
        expected[operation.block_ids] += UNIT_OF_HOLD[Hold.WRITE] * operation.writes
    expected[cached] += UNIT_OF_HOLD[Hold.CACHE]
    return expected
