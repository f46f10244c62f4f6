"""A block manager whose settled blocks are copied to the tiers when their owner lets them go."""

from blockmgr.block_manager import BlockManager
from blockmgr.holding import Holding
from blockmgr.tier_book import TierBook
from core.ids import BlockId, Owner
from core.tiers import BlockName


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
        """Begin to copy the blocks of ``holding`` that the prefix tree was offered."""
        book, tokens = self._book, holding.tokens
        if book is None or tokens is None or holding.cache_epoch != self._cache_epoch:
            return
        num_blocks = holding.num_offered_blocks
        columns = [table.entries[:num_blocks].tolist() for table in holding.tables]
        names: list[BlockName] = []
        block_ids: list[BlockId] = []
        for digest, *column in zip(tokens.digests(num_blocks), *columns, strict=True):
            for group, block_id in enumerate(column):
                if block_id >= 0:
                    names.append(book.name(group, digest))
                    block_ids.append(BlockId(block_id))
        copy = book.store(names, block_ids)
        if copy is not None:
            self.begin_operation(holding.owner, copy.block_ids, copy.operation)
