"""Who had each block last: for the report of a stale writer, so only where poison is on."""

import numpy as np

from blockmgr.free_queue import BlockIds
from core.ids import BlockId, OperationId, Owner


class BlockHistory:
    """The last owner and the last operation of every block."""

    def __init__(self, num_blocks: int) -> None:
        self._last_owner: list[Owner | None] = [None] * num_blocks
        self._last_operation = np.zeros(num_blocks, dtype=np.int64)

    def owned(self, block_ids: BlockIds, owner: Owner) -> None:
        """``owner`` has ``block_ids``."""
        for block_id in block_ids.tolist():
            self._last_owner[block_id] = owner

    def touched(self, block_ids: BlockIds, operation: OperationId) -> None:
        """``operation`` names ``block_ids``."""
        self._last_operation[block_ids] = operation

    def describe(self, block_id: BlockId) -> str:
        """Return both for one block."""
        operation = int(self._last_operation[block_id]) or None
        return f"last_owner={self._last_owner[block_id]} last_operation={operation}"
