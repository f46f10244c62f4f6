"""Gives blocks to holdings: pinned from the prefix cache, or new, all or none."""

from collections.abc import Sequence

import numpy as np

from blockmgr.block_queue import BlockIds
from blockmgr.holding import Holding
from blockmgr.pool import BlockPool
from blockmgr.prefix_cache import PrefixCache
from blockmgr.states import BlockState, Hold
from blockmgr.stats import BlockStats
from blockmgr.zero_list import ZeroList
from core.errors import InvalidTransitionError, OutOfBlocksError
from core.ids import BlockId, OperationId, Owner


class BlockAllocator:
    """Keeps pool, prefix cache and zero list in step with each other.

    A call that raises has changed nothing but the count of allocation failures.
    """

    def __init__(
        self, pool: BlockPool, cache: PrefixCache, zero_list: ZeroList, stats: BlockStats
    ) -> None:
        self._pool = pool
        self._cache = cache
        self._zero_list = zero_list
        self._stats = stats
        self._last_owner: list[Owner | None] = [None] * pool.num_blocks
        self._last_operation: list[OperationId | None] = [None] * pool.num_blocks

    def admit(self, holding: Holding, hashes: Sequence[bytes], num_blocks: int) -> None:
        """Give a new holding the hit up to its settled tokens, and ``num_blocks`` per group.

        Raises:
            OutOfBlocksError: nothing was taken, pinned or reordered.
            InvalidTransitionError: the hit is not usable at this length.
        """
        pinned = self._place_hit(holding, hashes)
        missing = [table.missing(num_blocks) for table in holding.tables]
        self._require(sum(map(len, missing)), pinned=pinned)
        self._pool.change(pinned, add=(Hold.OWNER,))
        self._name_owner(pinned, holding.owner)
        self._fill(holding, missing)

    def cost(self, holding: Holding, hashes: Sequence[bytes], num_blocks: int) -> int:
        """Return how many allocatable blocks ``admit`` would take for a holding to be thrown away.

        Raises:
            InvalidTransitionError: the hit is not usable at this length.
        """
        pinned = self._place_hit(holding, hashes)
        num_new = sum(len(table.missing(num_blocks)) for table in holding.tables)
        return num_new + self._pool.count_in(pinned, BlockState.CACHED)

    def grow(self, holding: Holding, num_blocks: int) -> None:
        """Cover ``num_blocks`` blocks in every table of ``holding``.

        Raises:
            OutOfBlocksError: nothing was taken.
        """
        missing = [table.missing(num_blocks) for table in holding.tables]
        count = sum(map(len, missing))
        if count:
            self._require(count)
            self._fill(holding, missing)

    def receive(self, holding: Holding, count: int) -> BlockIds:
        """Give ``holding`` ``count`` new blocks, already held by an operation that writes them.

        Raises:
            OutOfBlocksError: nothing was taken.
        """
        self._require(count)
        return self._allocate(count, holding, (Hold.OWNER, Hold.OPERATION, Hold.WRITE))

    def offer(self, holding: Holding, hashes: Sequence[bytes]) -> None:
        """Make the leading blocks of ``holding`` hit-able under ``hashes``.

        They hold settled tokens. The first block of a hash is kept, so that equal content stays
        where it is shared already.
        """
        first = holding.num_hashed_blocks
        if len(hashes) <= first:
            return
        for group, table in enumerate(holding.tables):
            block_ids = table.entries[first : len(hashes)].tolist()
            inserted = [
                block_id
                for block_hash, block_id in zip(hashes[first:], block_ids, strict=False)
                if block_id >= 0 and self._cache.insert(group, block_hash, block_id)
            ]
            if inserted:
                self._pool.change(np.array(inserted, dtype=np.int32), add=(Hold.CACHE,))
        holding.num_hashed_blocks = len(hashes)

    def forget_all(self) -> None:
        """Empty the prefix cache; blocks that nothing else holds become FREE."""
        block_ids = self._cache.block_ids
        self._cache.forget(block_ids)
        self._pool.change(block_ids, drop=(Hold.CACHE,))

    def name_operation(self, block_ids: BlockIds, operation: OperationId) -> None:
        """Remember ``operation`` as the last one on ``block_ids``."""
        for block_id in block_ids.tolist():
            self._last_operation[block_id] = operation

    def describe(self, block_id: BlockId) -> str:
        """Return what is known of a block, for the report of a stale writer."""
        generation = self._pool.generations(np.array([block_id], dtype=np.int32))[0]
        return (
            f"block={block_id} generation={generation} state={self._pool.state(block_id).name} "
            f"last_owner={self._last_owner[block_id]} "
            f"last_operation={self._last_operation[block_id]}"
        )

    def _place_hit(self, holding: Holding, hashes: Sequence[bytes]) -> BlockIds:
        """Put the hit into the tables of ``holding``, which nobody has seen yet."""
        try:
            hit = self._cache.find(hashes, holding.num_hashed_blocks)
        except (KeyError, IndexError) as error:
            raise InvalidTransitionError(
                f"{holding.owner}: no usable hit of {holding.num_hashed_blocks} blocks for these "
                "hashes; ask count_cached_tokens with exactly the hashes that may be hit"
            ) from error
        pinned = [np.empty(0, dtype=np.int32)]
        for table, runs in zip(holding.tables, hit, strict=True):
            for indices, block_ids in runs:
                table.put(indices, block_ids)
                pinned.append(block_ids)
            table.skip(holding.num_settled_tokens)
        return np.concatenate(pinned)

    def _require(self, count: int, *, pinned: BlockIds | None = None) -> None:
        """Raise unless ``count`` blocks are allocatable beside ``pinned``."""
        available = self._pool.num_allocatable
        if pinned is not None:
            available -= self._pool.count_in(pinned, BlockState.CACHED)
        if count > available:
            self._stats.allocation_failures += 1
            withheld = self._pool.num_withheld
            raise OutOfBlocksError(requested=count, free=available, withheld=withheld)

    def _fill(self, holding: Holding, missing: Sequence[list[int]]) -> None:
        """Allocate for the ``missing`` indices of each table at once, so that ids are adjacent."""
        block_ids = self._allocate(sum(map(len, missing)), holding, (Hold.OWNER,))
        at = 0
        for table, indices in zip(holding.tables, missing, strict=True):
            table.put(indices, block_ids[at : at + len(indices)])
            at += len(indices)
        self._zero_list.add(block_ids, holding)

    def _allocate(self, count: int, holding: Holding, holds: Sequence[Hold]) -> BlockIds:
        block_ids, evicted = self._pool.allocate(count, holds)
        self._cache.forget(evicted)
        self._stats.allocations += len(block_ids)
        self._stats.evictions += len(evicted)
        self._name_owner(block_ids, holding.owner)
        return block_ids

    def _name_owner(self, block_ids: BlockIds, owner: Owner) -> None:
        for block_id in block_ids.tolist():
            self._last_owner[block_id] = owner
