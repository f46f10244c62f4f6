"""Host memory and storage whose copies and calls end late, and sometimes fail."""

from collections.abc import Callable
from dataclasses import dataclass

from blockmgr.block_manager import BlockManager
from blockmgr.storing_blocks import StoringBlocks
from blockmgr.tier_book import TierBook, TierBounds
from blockmgr.tiers import Tiers
from core.ids import Incarnation
from core.kv_layout import KVLayout
from core.tiers import BlockName, CopyIn, CopyOut, Find, MarkEpoch, Read, TierAction, Write
from tests.property.virtual_time import Simulation


@dataclass(frozen=True, slots=True)
class HostMemory:
    """What a worker has below its pool."""

    num_slots: int
    """Blocks in host memory; 0: there is no tier."""
    storage: set[BlockName]


def make_blocks(
    layout: KVLayout, num_blocks: int, *, fences: bool, name: str, num_slots: int
) -> tuple[BlockManager, Tiers | None]:
    """Return the blocks of one worker, and its tiers if it has ``num_slots`` of host memory."""
    if not num_slots:
        return BlockManager(layout, num_blocks, fences=fences, prefix_caching=True), None
    bounds = TierBounds(num_slots, num_blocks // 4, num_slots // 2)
    book = TierBook(bounds, incarnation=Incarnation(name))
    blocks = StoringBlocks(layout, num_blocks, fences=fences, prefix_caching=True)
    blocks.store_into(book)
    return blocks, Tiers(blocks, layout, book)


class VirtualMover:
    """Carries actions out as ``transfer.tiers.mover`` does. ``storage`` is every worker's."""

    def __init__(
        self,
        simulation: Simulation,
        tiers: Tiers | None,
        storage: set[BlockName],
        *,
        on_change: Callable[[], None],
    ) -> None:
        self.num_ended = 0
        self._simulation = simulation
        self._tiers = tiers
        self._storage = storage
        self._on_change = on_change

    def carry_out(self) -> None:
        """Begin everything that was decided since the last call."""
        if self._tiers is None:
            return
        tiers, rng = self._tiers, self._simulation.rng
        for action in tiers.take_actions():
            delay = rng.choice((0.0, 0.001, 0.1, 2.0)) * rng.random()
            self._simulation.after(delay, lambda action=action: self._end(tiers, action))

    def _end(self, tiers: Tiers, action: TierAction) -> None:
        failed = self._simulation.rng.random() < 0.1
        match action:
            case CopyOut(operation):
                tiers.copied_out(operation, failed=failed)
            case CopyIn(operation):
                tiers.copied_in(operation, failed=failed)
            case Write(operation, names):
                self._storage.update(() if failed else names)
                tiers.written(operation, [not failed] * len(names))
            case Find(operation, names):
                known = [name in self._storage for name in names]
                tiers.found(operation, [*known, False].index(False))
            case Read(operation, names):
                tiers.read(operation, [name in self._storage and not failed for name in names])
            case MarkEpoch(_, epoch):
                tiers.marked(epoch, failed=failed)
        self.num_ended += 1
        self._on_change()
