"""Where a read lands: positions of one block table."""

from collections.abc import Sequence
from dataclasses import dataclass

from blockmgr.block_table import HOLE
from blockmgr.free_queue import BlockIds
from blockmgr.holding import Holding
from core.errors import InvalidTransitionError


@dataclass(frozen=True, slots=True)
class ReceiveTarget:
    """Positions of one block table that a read will fill."""

    group: int
    first_index: int
    """Absolute block index."""
    count: int

    @property
    def indices(self) -> range:
        """The positions."""
        return range(self.first_index, self.first_index + self.count)


def entries_to_fill(
    holding: Holding, targets: Sequence[ReceiveTarget], *, block_size: int
) -> list[BlockIds]:
    """Return per target the blocks that are there, and holes where one must be allocated.

    A block may be there if this holding receives it: the layers and ranks of one position come by
    an operation each. No step has been given it, and none of its tokens has settled.

    Raises:
        InvalidTransitionError: a target is empty, overlaps another, lies behind the window, or has
            a block that is not being received.
    """
    found: list[BlockIds] = []
    taken: set[tuple[int, int]] = set()
    for target in targets:
        table = holding.tables[target.group]
        entries = table.entries_at(target.indices)
        positions = {(target.group, index) for index in target.indices}
        is_held = entries != HOLE
        held = set(entries[is_held].tolist())
        first_held = target.first_index + int(is_held.argmax()) if held else 0
        is_settled = held and first_held * block_size < holding.num_settled_tokens
        if (
            not positions
            or positions & taken
            or table.has_lost_any(target.indices)
            or not held <= holding.received
            or is_settled
        ):
            raise InvalidTransitionError(f"{holding.owner} cannot receive {target}")
        taken |= positions
        found.append(entries)
    return found
