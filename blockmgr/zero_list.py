"""New blocks that the next step must clear before it uses them."""

import numpy as np

from blockmgr.free_queue import BlockIds
from blockmgr.holding import Holding
from blockmgr.pool import BlockPool
from blockmgr.states import Hold
from core.ids import BlockId


class ZeroList:
    """Remembers newly allocated blocks until a step takes them to be cleared.

    A block that a read may write, or that was let go, is never on it: clearing it would race the
    bytes that land.
    """

    def __init__(self, *, enabled: bool) -> None:
        self.is_enabled = enabled
        self._holding_of_block: dict[int, Holding] = {}

    def __len__(self) -> int:
        return len(self._holding_of_block)

    def add(self, block_ids: BlockIds, holding: Holding) -> None:
        """List ``block_ids``, which were just given to ``holding``."""
        if self.is_enabled:
            self._holding_of_block.update(dict.fromkeys(block_ids.tolist(), holding))

    def add_one(self, block_id: int, holding: Holding) -> None:
        """List ``block_id``, which was just given to ``holding``; only where this is enabled."""
        self._holding_of_block[block_id] = holding

    def remove(self, block_ids: BlockIds) -> None:
        """Forget those of ``block_ids`` that are listed."""
        if self._holding_of_block:
            for block_id in block_ids.tolist():
                self._holding_of_block.pop(block_id, None)

    def take(self) -> tuple[tuple[BlockId, ...], list[Holding]]:
        """Return the listed blocks in order of allocation, and their holdings; list none."""
        block_ids = tuple(BlockId(block_id) for block_id in self._holding_of_block)
        holdings = list(dict.fromkeys(self._holding_of_block.values()))
        self._holding_of_block.clear()
        return block_ids, holdings

    def check_invariants(self, pool: BlockPool) -> None:
        """Assert that every listed block is owned and that nothing writes it."""
        block_ids = np.array(list(self._holding_of_block), dtype=np.int64)
        assert (pool.holds(Hold.OWNER, block_ids) > 0).all(), "a block to clear has no owner"
        assert not pool.holds(Hold.WRITE, block_ids).any(), "a block to clear may be written"
