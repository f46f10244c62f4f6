"""What an operator can do to a worker's prefix cache: forget it, and see what is in it."""

from typing import Literal

from blockmgr.block_ages import BlockAges
from blockmgr.block_manager import BlockManager
from blockmgr.states import BlockState
from blockmgr.tier_book import TierBook
from core.messages import CacheState, TierUse
from core.tiers import Tier


class CacheControl:
    """Resets and describes one worker's cache; the ``Cache`` of its report.

    Args:
        blocks: The pool's manager. Its reset reaches the tiers below, too.
        ages: Of its blocks.
        book: Of the tiers below; None: there are none.
    """

    def __init__(self, blocks: BlockManager, ages: BlockAges, book: TierBook | None = None) -> None:
        self._blocks = blocks
        self._ages = ages
        self._book = book
        self._reset_at: float | None = None

    @property
    def epoch(self) -> str:
        """Of the newest reset that is known; "": none, or there are no tiers."""
        return "" if self._book is None else self._book.epoch

    def reset(self, epoch: str = "") -> None:
        """Forget every prefix computed up to now: from this moment none can be hit.

        ``epoch`` is what stored blocks are named after from now on; "": one of this worker alone.
        What is in use stays with its owner. ``state`` says "pending" until each block that was in
        use (owned, leased, FENCED or QUARANTINED) at this moment has been FREE once.
        """
        if self._book is not None:
            self._book.choose_epoch(epoch)
        self._blocks.reset_cache()
        self._reset_at = self._ages.now()

    def state(self) -> CacheState:
        """Return the blocks by state, the counters, and how far the last reset is."""
        counts = self._blocks.counts()
        stats = self._blocks.stats
        return CacheState(
            blocks={state.name.lower(): count for state, count in counts.items()},
            query_tokens=stats.query_tokens,
            hit_tokens=stats.hit_tokens,
            evictions=stats.evictions,
            resets=stats.cache_resets,
            reset="none" if self._reset_at is None else self._reset_state(self._reset_at),
            tiers=(
                TierUse(Tier.DEVICE, counts[BlockState.CACHED], stats.hit_tokens),
                *self._lower_tiers(),
            ),
            storage="none" if self._book is None else self._book.storage_reset,
        )

    def _lower_tiers(self) -> list[TierUse]:
        """Host memory, and storage as far as this worker knows what is in it."""
        book = self._book
        if book is None:
            return []
        hits = book.stats.hit_tokens
        tiers = [TierUse(Tier.HOST, len(book.host), hits[Tier.HOST])]
        if book.storage is not None:
            known = book.storage.num_known_blocks
            tiers.append(TierUse(Tier.STORAGE, known, hits[Tier.STORAGE]))
        return tiers

    def _reset_state(self, reset_at: float) -> Literal["pending", "done"]:
        return "pending" if self._ages.has_older_than(reset_at) else "done"
