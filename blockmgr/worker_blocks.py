"""A worker's block manager together with everything that watches it."""

from collections.abc import Callable
from dataclasses import dataclass

from prometheus_client import CollectorRegistry

from blockmgr.age_metrics import AgeCollector
from blockmgr.block_ages import BlockAges
from blockmgr.block_manager import BlockManager
from blockmgr.cache_control import CacheControl
from blockmgr.fences import KVWriters, fences_needed
from blockmgr.history import BlockHistory
from blockmgr.metrics import BlockCollector
from blockmgr.poison import Poison, PoisonableMemory
from blockmgr.poison_metrics import PoisonCollector
from blockmgr.pool import BlockObserver
from core.config import SluiceConfig
from core.ids import Incarnation
from core.kv_layout import KVLayout


@dataclass(frozen=True, slots=True)
class WorkerBlocks:
    """Made once per worker, by ``make``."""

    manager: BlockManager
    ages: BlockAges
    control: CacheControl
    poison: Poison | None
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
        manager = BlockManager(
            layout,
            num_blocks,
            fences=config.cache.poison or fences_needed(config.scheduler.overlap_depth, writers),
            prefix_caching=config.cache.prefix_caching,
            zero_on_allocate=config.cache.zero_on_allocate,
            observers=observers,
            history=history,
        )
        return cls(manager, ages, CacheControl(manager, ages), poison)

    def export(self, registry: CollectorRegistry, *, role: str) -> None:
        """Add the metrics of blocks, their ages and, where it is on, poison to ``registry``."""
        registry.register(BlockCollector(self.manager, role=role))
        registry.register(AgeCollector(self.ages, role=role))
        if self.poison is not None:
            registry.register(PoisonCollector(self.poison, role=role))
