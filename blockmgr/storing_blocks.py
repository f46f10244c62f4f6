"""A block manager whose settled blocks are copied to the tiers when their owner lets them go."""

from collections.abc import Sequence

from blockmgr.block_manager import BlockManager
from blockmgr.history import BlockHistory
from blockmgr.holding import Holding
from blockmgr.pool import BlockObserver
from blockmgr.tier_book import TierBook
from core.ids import BlockId, Owner
from core.kv_layout import KVLayout
from core.tiers import BlockName


class StoringBlocks(BlockManager):
    """Adds a copy to every release: finish, abort, preemption, and the lease of a prompt.

    The copy is an operation of the owner that reads, begun before the release. So a release is
    immediate, whatever becomes of the copy, and the blocks are QUARANTINED until it has ended, for
    then the bytes could be another owner's. Where the tiers take no more, nothing is copied.

    Args:
        layout: See ``BlockManager``.
        num_blocks: See ``BlockManager``.
        fences: See ``BlockManager``.
        zero_on_allocate: See ``BlockManager``.
        observers: See ``BlockManager``.
        history: See ``BlockManager``.
        book: Where the copies are queued, and what the tiers have.
    """

    def __init__(
        self,
        layout: KVLayout,
        num_blocks: int,
        *,
        fences: bool,
        book: TierBook,
        zero_on_allocate: bool = False,
        observers: Sequence[BlockObserver] = (),
        history: BlockHistory | None = None,
    ) -> None:
        super().__init__(
            layout,
            num_blocks,
            fences=fences,
            prefix_caching=True,
            zero_on_allocate=zero_on_allocate,
            observers=observers,
            history=history,
        )
        self._book = book

    def release(self, owner: Owner) -> None:
        """See ``BlockManager``; what only the pool has begins its way to host memory."""
        holding = self._holdings.get(owner)
        if holding is not None:
            self._store(holding)
        super().release(owner)

    def lease(self, owner: Owner) -> None:
        """See ``BlockManager``; the copy runs beside the reader, and the blocks wait for both."""
        super().lease(owner)
        self._store(self._held(owner))

    def reset_cache(self) -> bool:
        """See ``BlockManager``; nothing in the tiers can be hit any more either."""
        self._book.forget_all()
        return super().reset_cache()

    def _store(self, holding: Holding) -> None:
        """Begin to copy the blocks of ``holding`` that the prefix tree was offered."""
        tokens = holding.tokens
        if tokens is None or holding.cache_epoch != self._cache_epoch:
            return
        digests = tokens.digests(holding.num_offered_blocks)
        names: list[BlockName] = []
        block_ids: list[BlockId] = []
        for index, digest in enumerate(digests):
            for group, table in enumerate(holding.tables):
                block_id = int(table.entries[index])
                if block_id >= 0:
                    names.append(self._book.name(group, digest))
                    block_ids.append(BlockId(block_id))
        copy = self._book.store(names, block_ids)
        if copy is not None:
            self.begin_operation(holding.owner, copy.block_ids, copy.operation)
