"""Recounts what must hold each block, from everything that can hold one."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from blockmgr.block_queue import BlockIds
from blockmgr.fences import PendingOperation
from blockmgr.holding import Holding
from blockmgr.states import Hold


def count_expected_holds(
    num_blocks: int,
    *,
    holdings: Sequence[Holding],
    deferred: Sequence[BlockIds],
    pending: Sequence[PendingOperation],
    cached: BlockIds,
) -> NDArray[np.int32]:
    """Return the holds [hold, block] that these holders amount to."""
    expected = np.zeros((len(Hold), num_blocks), dtype=np.int32)
    for holding in holdings:
        kind = Hold.LEASE if holding.is_lease else Hold.OWNER
        block_ids = holding.release_order
        assert len(np.unique(block_ids)) == len(block_ids), f"{holding.owner} has a block twice"
        expected[kind, block_ids] += 1
    for block_ids in deferred:
        expected[Hold.STEP, block_ids] += 1
    for operation in pending:
        expected[Hold.OPERATION, operation.block_ids] += 1
        expected[Hold.WRITE, operation.block_ids] += operation.writes
    expected[Hold.CACHE, cached] = 1
    return expected
