"""What one owner holds: a block table per KV group, and how far its tokens have settled."""

from dataclasses import dataclass, field

import numpy as np

from blockmgr.block_table import BlockTable
from blockmgr.free_queue import BlockIds
from blockmgr.prefix_node import PrefixNode
from blockmgr.token_run import TokenRun
from core.ids import Owner, StepSeq


@dataclass(slots=True, eq=False)
class Holding:
    """One life of an owner in the pool, from admission to release.

    An owner that is admitted again gets a new one, so steps and operations of its earlier life
    cannot reach the new blocks.
    """

    owner: Owner
    tables: tuple[BlockTable, ...]
    tokens: TokenRun | None
    """Under which its settled blocks can be found; None: they cannot."""
    cache_epoch: int
    """The prefix tree's at admission: what was computed before a reset is never shared after."""
    num_settled_tokens: int
    num_offered_blocks: int
    """Leading blocks that have been offered to the prefix tree."""
    prefix_node: PrefixNode | None = None
    """Where the last offer, or the hit, ended."""
    prefix_version: int = 0
    """Of that node, then."""
    num_known_blocks: int = 0
    """Full blocks of ``tokens`` at admission."""
    num_tokens_of_next_offer: int = 0
    """Settled tokens with which the next blocks are offered."""
    num_covered_tokens: int = 0
    """Tokens from the first on that have room in every group."""
    num_tokens_of_next_change: int = 0
    """Settling fewer tokens than these neither offers a block nor moves a window."""
    is_lease: bool = False
    received: set[int] = field(default_factory=set[int])
    """Blocks that operations fill, or have filled, and that no step has been given since."""
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
        if len(self.tables) == 1:
            return self.tables[0].held[::-1]
        return np.concatenate([table.held[::-1] for table in self.tables])
