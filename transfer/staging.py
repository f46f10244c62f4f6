"""Room for bytes of another shape, until they are where they belong. Arithmetic only."""

import itertools
from bisect import insort

from core.errors import InternalError

ALIGNMENT = 256
"""Of every piece of room, so that it can be seen as numbers of any size."""


class Staging:
    """Part of the registered memory, handed out in pieces that do not overlap.

    Invariants (``check_invariants``): free runs are ascending, apart from each other, not empty.
    """

    def __init__(self, room: range) -> None:
        """Hand out ``room``: offsets in the registered memory."""
        self._room = room
        self._free = [(room.start, room.stop)] if room else []
        self._taken: dict[int, int] = {}

    @property
    def nbytes(self) -> int:
        """In all."""
        return len(self._room)

    @property
    def is_unused(self) -> bool:
        """Whether everything was given back."""
        return not self._taken

    def take(self, nbytes: int) -> int | None:
        """Return the offset of ``nbytes`` that are nobody else's; None: not now."""
        size = padded(nbytes)
        for at, (start, stop) in enumerate(self._free):
            if stop - start >= size:
                rest = (start + size, stop)
                self._free[at : at + 1] = [rest] if rest[0] < stop else []
                self._taken[start] = size
                return start
        return None

    def give_back(self, offset: int) -> None:
        """What ``take`` has returned is free again: nothing is written there any more.

        Raises:
            InternalError: it is free already.
        """
        size = self._taken.pop(offset, None)
        if size is None:
            raise InternalError(f"staging at {offset} was given back twice")
        insort(self._free, (offset, offset + size))
        merged = self._free[:1]
        for start, stop in self._free[1:]:
            if start == merged[-1][1]:
                merged[-1] = (merged[-1][0], stop)
            else:
                merged.append((start, stop))
        self._free = merged

    def check_invariants(self) -> None:
        """Assert the invariant above, and that nothing is lost: for tests."""
        runs = [*self._free, *((at, at + size) for at, size in self._taken.items())]
        assert all(start < stop for start, stop in runs)
        assert sum(stop - start for start, stop in runs) == self.nbytes
        runs.sort()
        assert all(one[1] == other[0] for one, other in itertools.pairwise(runs))
        ends = {stop for _, stop in self._free}
        assert ends.isdisjoint(start for start, _ in self._free), "two free runs touch"


def padded(nbytes: int) -> int:
    """Return what ``nbytes`` take of a staging."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
