"""Which objects must go so that a storage stays within its bound."""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Final

_KEPT_FRACTION: Final = 0.9
"""Of the bound, after a trim: so that the next one is some way off."""
CHECK_FRACTION: Final = 0.05
"""Of the bound: what a worker writes between two looks at the whole."""


@dataclass(frozen=True, slots=True)
class StoredObject:
    """One object as a listing shows it."""

    path: str
    nbytes: int
    written_at: datetime


def surplus(objects: Iterable[StoredObject], *, max_nbytes: int) -> list[str]:
    """Return the paths to delete, those written first; none while the bound is kept."""
    by_age = sorted(objects, key=lambda each: each.written_at)
    excess = sum(each.nbytes for each in by_age) - max_nbytes
    if excess <= 0:
        return []
    excess += int((1 - _KEPT_FRACTION) * max_nbytes)
    paths: list[str] = []
    for each in by_age:
        if excess <= 0:
            break
        paths.append(each.path)
        excess -= each.nbytes
    return paths
