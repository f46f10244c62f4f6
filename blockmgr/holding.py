"""What one owner holds: a block table per KV group, and how far its tokens have settled."""

from dataclasses import dataclass, field

import numpy as np

from blockmgr.block_queue import BlockIds
from blockmgr.block_table import BlockTable
from core.ids import Owner, StepSeq


@dataclass(slots=True, eq=False)
class Holding:
    """One life of an owner in the pool, from admission to release.

    An owner that is admitted again gets a new one, so steps and operations of its earlier life
    cannot reach the new blocks.
    """

    owner: Owner
    tables: tuple[BlockTable, ...]
    cache_epoch: int
    """The prefix cache's at admission: what was computed before a reset is never shared after."""
    num_settled_tokens: int
    num_hashed_blocks: int
    """Leading blocks that have been offered to the prefix cache."""
    is_lease: bool = False
    num_writes: int = 0
    """Pending operations that write its blocks."""
    steps_in_flight: list[StepSeq] = field(default_factory=list[StepSeq])
    """Dispatched steps that may touch its blocks, ascending."""

    @property
    def num_covered_blocks(self) -> int:
        """Leading blocks that no table lacks."""
        return min(table.num_covered_blocks for table in self.tables)

    @property
    def release_order(self) -> BlockIds:
        """All its blocks, per group from the last to the first.

        A prefix is worth more than what follows it, and useless blocks should be reused first.
        """
        return np.concatenate([table.held[::-1] for table in self.tables])
