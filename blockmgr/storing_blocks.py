"""A block manager whose settled blocks are copied to the tiers when their owner lets them go."""

from typing import Final

import numpy as np

from blockmgr.block_manager import BlockManager
from blockmgr.holding import Holding
from blockmgr.states import Hold, HoldChange
from blockmgr.tier_book import TierBook
from core.ids import BlockId, Owner
from core.tiers import CopyOut

_BEGIN_COPY: Final = HoldChange(add=(Hold.OPERATION,))


class StoringBlocks(BlockManager):
    """Adds a copy to every release: finish, abort, preemption, and the lease of a prompt.

    The copy is an operation of the owner that reads, begun before the release. So a release is
    immediate, whatever becomes of the copy, and the blocks are QUARANTINED until it has ended, for
    then the bytes could be another owner's. Where the tiers take no more, nothing is copied.

    Until ``store_into`` is called this is a ``BlockManager`` and nothing else.
    """

    _book: TierBook | None = None

    def store_into(self, book: TierBook) -> None:
        """Queue the copies in ``book`` from now on; a reset forgets what is in it."""
        self._book = book

    def release(self, owner: Owner) -> None:
        """See ``BlockManager``; what only the pool has begins its way to host memory."""
        holding = self._holdings.get(owner)
        if holding is not None and not holding.is_lease:
            self._store(holding)
        super().release(owner)

    def lease(self, owner: Owner) -> None:
        """See ``BlockManager``; the copy runs beside the reader, and the blocks wait for both."""
        super().lease(owner)
        self._store(self._held(owner))

    def reset_cache(self) -> bool:
        """See ``BlockManager``; nothing in the tiers can be hit any more either."""
        if self._book is not None:
            self._book.forget_all()
        return super().reset_cache()

    def _store(self, holding: Holding) -> None:
        """Begin to copy what a hit of all that ``holding`` offered needs.

        That is asked of the prefix tree, not of the tables: a window moves on within the last
        block, and what it has left behind is still needed by a hit that ends in front of it.
        """
        book, tokens = self._book, holding.tokens
        if book is None or tokens is None or holding.cache_epoch != self._cache_epoch:
            return
        self._offer(holding)
        num_blocks = self._tree.count_usable_blocks(tokens, holding.num_offered_blocks)
        hit = self._tree.find(tokens, num_blocks) if num_blocks else None
        if hit is None:
            return
        digests = tokens.digests(num_blocks)
        needed = [
            (index, group, block_id)
            for group, runs in enumerate(hit.runs)
            for indices, block_ids in runs
            for index, block_id in zip(indices, block_ids.tolist(), strict=True)
        ]
        needed.sort()
        copy = book.store(
            [book.name(group, digests[index]) for index, group, _ in needed],
            [BlockId(block_id) for _, _, block_id in needed],
        )
        if copy is not None:
            self._begin_reading(holding, copy)

    def _begin_reading(self, holding: Holding, copy: CopyOut) -> None:
        """As ``begin_operation``, of blocks that need not be the holding's: the tree has them."""
        block_ids = np.array(copy.block_ids, dtype=np.int64)
        self._pool.change(block_ids, _BEGIN_COPY)
        self._begin(holding, block_ids, copy.operation, writes=False)
