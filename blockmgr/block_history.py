"""Who had each block last, for the report of a stale writer."""

from blockmgr.block_queue import BlockIds
from core.ids import BlockId, OperationId, Owner


class BlockHistory:
    """Remembers each block's last owner and last operation; costs work per block of a batch."""

    def __init__(self, num_blocks: int) -> None:
        self._last_owner: list[Owner | None] = [None] * num_blocks
        self._last_operation: list[OperationId | None] = [None] * num_blocks

    def owned(self, block_ids: BlockIds, owner: Owner) -> None:
        """``block_ids`` were given to ``owner``."""
        for block_id in block_ids.tolist():
            self._last_owner[block_id] = owner

    def operated(self, block_ids: BlockIds, operation: OperationId) -> None:
        """``operation`` began on ``block_ids``."""
        for block_id in block_ids.tolist():
            self._last_operation[block_id] = operation

    def describe(self, block_id: BlockId) -> str:
        """Return the block's last owner and last operation."""
        owner = self._last_owner[block_id]
        named = "none" if owner is None else f"{owner[0]} attempt={owner[1]}"
        operation = self._last_operation[block_id]
        return f"last_owner={named} last_operation={'none' if operation is None else operation}"
