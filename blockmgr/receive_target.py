"""Where a read lands: positions of one block table."""

from collections.abc import Sequence
from dataclasses import dataclass

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


def require_vacant(holding: Holding, targets: Sequence[ReceiveTarget]) -> None:
    """Check that every position of ``targets`` can take a block, each once.

    Raises:
        InvalidTransitionError: a target is empty, has a block already, overlaps another, or lies
            behind the window.
    """
    taken: set[tuple[int, int]] = set()
    for target in targets:
        positions = {(target.group, index) for index in target.indices}
        is_vacant = not holding.tables[target.group].has_any(target.indices)
        if not positions or not is_vacant or positions & taken:
            raise InvalidTransitionError(f"{holding.owner} cannot receive {target}")
        taken |= positions
