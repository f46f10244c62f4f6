"""What is still to be posted, by owner and peer, and what a post takes of the link."""

import bisect
from collections import deque
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from core.ids import Incarnation, OperationId
from transfer.transport import FEW_ROWS, ExtentRows

DESCRIPTOR_COST_NBYTES: Final = 8192
"""What a descriptor takes of a link beside its bytes, as bytes: 2 us at 4 GB/s."""


@dataclass(slots=True, eq=False)
class Unposted:
    """What one operation reads of one peer, and how far it was posted."""

    operation: OperationId
    extents: ExtentRows
    nbytes: int
    """Of those that are not posted."""
    at: int = 0
    costs: list[int] | None = None
    """n + 1: of all extents before the i-th; made where a part is posted piece by piece."""

    @property
    def is_posted(self) -> bool:
        """Whether nothing is left."""
        return self.at == len(self.extents)

    def take(self, credit: int) -> tuple[ExtentRows, int]:
        """Return the next extents that cost at most ``credit``, and their bytes."""
        if cost_of(self.nbytes, len(self.extents) - self.at) <= credit:
            taken, nbytes = self.extents[self.at :], self.nbytes
        else:
            if self.costs is None:
                self.costs = _costs_before(self.extents)
            stop = bisect.bisect_right(self.costs, self.costs[self.at] + credit) - 1
            taken = self.extents[self.at : stop]
            nbytes = nbytes_of(taken)
        self.at += len(taken)
        self.nbytes -= nbytes
        return taken, nbytes


@dataclass(slots=True, eq=False)
class Flow:
    """One owner's parts from one peer, oldest first."""

    peer: Incarnation
    parts: deque[Unposted] = field(default_factory=deque[Unposted])
    credit: int = 0

    def drop(self, operation: OperationId) -> int:
        """Forget the parts of ``operation``; return how many those were."""
        kept = deque(part for part in self.parts if part.operation != operation)
        num_dropped = len(self.parts) - len(kept)
        self.parts = kept
        return num_dropped


def cost_of(nbytes: int, num_descriptors: int) -> int:
    """Return what a read takes of a link, as bytes."""
    return nbytes + num_descriptors * DESCRIPTOR_COST_NBYTES


def nbytes_of(extents: ExtentRows) -> int:
    """Return the bytes of all of them."""
    sizes = extents[:, 2]
    return sum(sizes.tolist()) if len(sizes) <= FEW_ROWS else int(sizes.sum())


def _costs_before(extents: ExtentRows) -> list[int]:
    costs = np.zeros(len(extents) + 1, dtype=np.int64)
    np.cumsum(extents[:, 2] + DESCRIPTOR_COST_NBYTES, out=costs[1:])
    return costs.tolist()
