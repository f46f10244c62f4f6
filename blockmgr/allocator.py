"""Gives blocks to holdings: pinned from the prefix tree, or new, all or none."""

from array import array
from collections.abc import Sequence

import numpy as np

from blockmgr.block_table import HOLE
from blockmgr.free_queue import BlockIds
from blockmgr.holding import Holding
from blockmgr.pool import BlockPool
from blockmgr.prefix_tree import PrefixTree
from blockmgr.states import Hold, HoldChange
from blockmgr.stats import BlockStats
from blockmgr.token_run import TokenRun
from blockmgr.zero_list import ZeroList
from core.errors import DoubleReleaseError, InvalidTransitionError, OutOfBlocksError

_NO_BLOCKS = np.empty(0, dtype=np.int64)
_PIN = HoldChange(add=(Hold.OWNER,))
_FORGET = HoldChange(drop=(Hold.CACHE,))


class BlockAllocator:
    """Keeps pool, prefix tree and zero list in step with each other.

    A call that raises has changed nothing but the count of allocation failures.
    """

    def __init__(
        self,
        pool: BlockPool,
        tree: PrefixTree,
        zero_list: ZeroList,
        stats: BlockStats,
        *,
        block_size: int,
    ) -> None:
        self._pool = pool
        self._tree = tree
        self._zero_list = zero_list
        self._stats = stats
        self._block_size = block_size

    def admit(self, holding: Holding, num_blocks: int) -> BlockIds:
        """Give a new holding the hit up to its settled tokens, and ``num_blocks`` per group.

        Returns:
            The blocks of the hit.

        Raises:
            OutOfBlocksError: nothing was taken, pinned or reordered.
            InvalidTransitionError: the hit is not usable at this length.
        """
        for table in holding.tables:
            table.make_room(num_blocks)
        pinned = self._place_hit(holding)
        missing = [table.missing(num_blocks) for table in holding.tables]
        count = sum(map(len, missing))
        self.require(count, pinned=pinned)
        if len(pinned):
            self._pool.change(pinned, _PIN)
        if count:
            self._fill(holding, missing, count)
        num_covered = max(num_blocks, holding.num_offered_blocks)
        holding.num_covered_tokens = num_covered * self._block_size
        return pinned

    def cost(self, holding: Holding, num_blocks: int) -> int:
        """Return how many allocatable blocks ``admit`` would take for a holding to be thrown away.

        Raises:
            InvalidTransitionError: the hit is not usable at this length.
        """
        pinned = self._place_hit(holding)
        num_new = sum(len(table.missing(num_blocks)) for table in holding.tables)
        return num_new + int(self._pool.is_cached(pinned).sum())

    def grow(self, holding: Holding, num_blocks: int) -> None:
        """Cover ``num_blocks`` blocks in every table of ``holding``.

        Raises:
            OutOfBlocksError: nothing was taken.
        """
        is_next = num_blocks == holding.num_covered_tokens // self._block_size + 1
        if is_next and self._append_column(holding, num_blocks):
            return
        missing = [table.missing(num_blocks) for table in holding.tables]
        count = sum(map(len, missing))
        if count:
            self.require(count)
            self._fill(holding, missing, count)
            self.note_cover(holding)

    def _append_column(self, holding: Holding, num_blocks: int) -> bool:
        """Put one block behind each table; False, without a trace: not that simple."""
        tables, pool = holding.tables, self._pool
        for table in tables:
            if table.num_blocks != num_blocks - 1:
                return False
        lacking = len(tables) - pool.num_free
        if lacking > 0:
            if len(tables) > pool.num_allocatable:
                return False
            self._evict(lacking)
        for table in tables:
            block_id = pool.allocate_one()
            table.append(block_id)
            if self._zero_list.is_enabled:
                self._zero_list.add_one(block_id, holding)
        self._stats.allocations += len(tables)
        holding.num_covered_tokens = num_blocks * self._block_size
        return True

    def receive(self, count: int) -> BlockIds:
        """Return ``count`` new blocks, owned and already held by an operation that writes them.

        Raises:
            OutOfBlocksError: nothing was taken.
        """
        self.require(count)
        return self._allocate(count, Hold.OWNER, Hold.OPERATION, Hold.WRITE)

    def offer(self, holding: Holding, num_blocks: int) -> None:
        """Make the leading ``num_blocks`` of ``holding`` findable: they hold settled tokens.

        The first block of a prefix is kept, so that equal content stays where it is shared
        already.
        """
        tokens, node = holding.tokens, holding.prefix_node
        first = holding.num_offered_blocks
        if tokens is None:
            return
        if node is not None and not self._tree.has_place(node, holding.prefix_version, first):
            node, first = None, 0  # what others kept there was given up since
        if num_blocks <= first:
            return
        holding.num_offered_blocks = num_blocks
        if num_blocks == first + 1 and self._offer_one(holding, tokens, first):
            return
        node, taken = self._tree.offer(tokens, holding.tables, node, first, num_blocks)
        holding.prefix_node, holding.prefix_version = node, node.version
        if len(taken) == 1:
            self._pool.keep_one(taken[0])
        elif taken:
            self._pool.keep(np.frombuffer(taken, dtype=np.int64))

    def _offer_one(self, holding: Holding, tokens: TokenRun, index: int) -> bool:
        """Lengthen the leaf that the last offer ended in; False, without a trace: it is none."""
        node = holding.prefix_node
        if node is None or node.end != index or node.version != holding.prefix_version:
            return False
        column = array("q", [table.block_at(index) for table in holding.tables])
        if not self._tree.extend_leaf(node, column, tokens.slice(index, index + 1)):
            return False
        for block_id in column:
            if block_id != HOLE:
                self._pool.keep_one(block_id)
        return True

    def forget_all(self) -> None:
        """Empty the prefix tree; blocks that nothing else holds become FREE."""
        block_ids = self._tree.forget_all()
        if len(block_ids):
            self._pool.change(block_ids, _FORGET)

    def _place_hit(self, holding: Holding) -> BlockIds:
        """Put the hit into the tables of ``holding``, which nobody has seen yet."""
        num_blocks = holding.num_offered_blocks
        if not num_blocks:
            return _NO_BLOCKS
        hit = None if holding.tokens is None else self._tree.find(holding.tokens, num_blocks)
        if hit is None:
            raise InvalidTransitionError(
                f"{holding.owner}: no usable hit of {num_blocks} blocks for these tokens; ask "
                "count_cached_tokens with max_tokens for what may be hit"
            )
        holding.prefix_node, holding.prefix_version = hit.node, hit.node.version
        pinned: list[BlockIds] = []
        for table, runs in zip(holding.tables, hit.runs, strict=True):
            for indices, block_ids in runs:
                table.put(indices, block_ids)
                pinned.append(block_ids)
            table.skip(holding.num_settled_tokens)
        return pinned[0] if len(pinned) == 1 else np.concatenate((*pinned, _NO_BLOCKS))

    def require(self, count: int, *, pinned: BlockIds = _NO_BLOCKS) -> None:
        """Return if ``count`` blocks are allocatable beside ``pinned``.

        Raises:
            OutOfBlocksError: they are not. Nothing was taken.
        """
        available = self._pool.num_allocatable
        if count > available - len(pinned):
            available -= int(self._pool.is_cached(pinned).sum())
        if count > available:
            self._stats.allocation_failures += 1
            withheld = self._pool.num_withheld
            raise OutOfBlocksError(requested=count, free=available, withheld=withheld)

    def _fill(self, holding: Holding, missing: Sequence[range | list[int]], count: int) -> None:
        """Allocate for the ``missing`` indices of each table at once, so that ids are adjacent."""
        block_ids = self._allocate(count, Hold.OWNER)
        at = 0
        for table, indices in zip(holding.tables, missing, strict=True):
            table.put(indices, block_ids[at : at + len(indices)])
            at += len(indices)
        self._zero_list.add(block_ids, holding)

    def _allocate(self, count: int, *holds: Hold) -> BlockIds:
        lacking = count - self._pool.num_free
        if lacking > 0:
            self._evict(lacking)
        self._stats.allocations += count
        return self._pool.allocate(count, *holds)

    def _evict(self, count: int) -> None:
        """Make ``count`` of the CACHED blocks FREE."""
        block_id = self._tree.evict_one() if count == 1 else None
        if block_id is None:
            self._tree.evict(count, self._recycle)
        else:
            self._pool.evict_one(block_id)
            self._stats.evictions += 1
            self._stats.eviction_batches += 1

    def _recycle(self, block_ids: BlockIds) -> None:
        """Take the tree's hold of evicted blocks. One that has none is no reason to lose others."""
        self._stats.evictions += len(block_ids)
        self._stats.eviction_batches += 1
        try:
            self._pool.change(block_ids, _FORGET)
        except DoubleReleaseError:
            self._stats.double_releases += 1
            raise

    def note_cover(self, holding: Holding) -> None:
        """Bring the covered tokens of ``holding`` in line with its tables."""
        holding.num_covered_tokens = holding.num_covered_blocks * self._block_size
