"""A worker's block manager together with everything that watches it."""

from collections.abc import Callable
from dataclasses import dataclass

from prometheus_client import CollectorRegistry

from blockmgr.age_metrics import AgeCollector
from blockmgr.block_ages import BlockAges
from blockmgr.cache_control import CacheControl
from blockmgr.fences import KVWriters, fences_needed
from blockmgr.history import BlockHistory
from blockmgr.metrics import BlockCollector
from blockmgr.poison import Poison, PoisonableMemory
from blockmgr.poison_metrics import PoisonCollector
from blockmgr.pool import BlockObserver
from blockmgr.storing_blocks import StoringBlocks
from blockmgr.tier_book import TierBook, TierBounds
from blockmgr.tier_metrics import TierCollector
from blockmgr.tiers import Tiers
from core.config import SluiceConfig
from core.ids import Incarnation
from core.kv_layout import KVLayout


@dataclass(frozen=True, slots=True)
class WorkerBlocks:
    """Made once per worker, by ``make``."""

    manager: StoringBlocks
    ages: BlockAges
    control: CacheControl
    poison: Poison | None
    """None: off."""
    tiers: Tiers | None
    """None: off."""

    @classmethod
    def make(
        cls,
        layout: KVLayout,
        memory: PoisonableMemory,
        config: SluiceConfig,
        *,
        incarnation: Incarnation,
        writers: KVWriters,
        clock: Callable[[], float],
    ) -> "WorkerBlocks":
        """Return the manager of a pool whose blocks nobody uses yet.

        Poison turns step fences on whatever ``writers`` says: without them a step in flight may
        rightly write a block that is FREE.
        """
        num_blocks = memory.num_blocks
        ages = BlockAges(num_blocks, clock=clock)
        observers: list[BlockObserver] = [ages]
        history = poison = None
        if config.cache.poison:
            history = BlockHistory(num_blocks)
            poison = Poison(num_blocks, memory, history, seed=int(incarnation, 16))
            observers.append(poison)
        bounds = TierBounds.of(config.cache, layout, num_blocks=num_blocks)
        book = None if bounds is None else TierBook(bounds, incarnation=incarnation)
        fences = config.cache.poison or fences_needed(
            writers,
            # An abort is heard while a step runs, whatever the depth.
            releases_meet_steps=True,
            has_loading_tier=book is not None,
        )
        manager = StoringBlocks(
            layout,
            num_blocks,
            fences=fences,
            prefix_caching=config.cache.prefix_caching,
            zero_on_allocate=config.cache.zero_on_allocate,
            observers=observers,
            history=history,
        )
        tiers = None
        if book is not None:
            manager.store_into(book)
            tiers = Tiers(manager, layout, book)
        return cls(manager, ages, CacheControl(manager, ages, book), poison, tiers)

    def export(self, registry: CollectorRegistry, *, role: str) -> None:
        """Add the metrics of blocks, their ages and, where they are on, poison and tiers."""
        hits = None if self.tiers is None else self.tiers.book.stats.hit_tokens
        registry.register(BlockCollector(self.manager, role=role, lower_hit_tokens=hits))
        if self.tiers is not None:
            registry.register(TierCollector(self.tiers.book, role=role))
        registry.register(AgeCollector(self.ages, role=role))
        if self.poison is not None:
            registry.register(PoisonCollector(self.poison, role=role))
