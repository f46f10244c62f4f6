"""One number per node or block, for one at a time and for many at once."""

from array import array

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]


class NodeArray:
    """Integers by index, with two faces on one memory.

    ``one`` is Python's, several times faster for a single number; ``many`` is numpy's.
    """

    def __init__(self, size: int, fill: int) -> None:
        self._fill = fill
        self.one = array("q", [fill]) * size
        self.many: Indices = np.frombuffer(self.one, dtype=np.int64)

    def __len__(self) -> int:
        return len(self.one)

    def reserve(self, size: int) -> None:
        """Have room for indices below ``size``; whoever kept a face must fetch it again."""
        if size > len(self.one):
            missing = max(size, 2 * len(self.one)) - len(self.one)
            self.one = array("q", self.one) + array("q", [self._fill]) * missing
            self.many = np.frombuffer(self.one, dtype=np.int64)
