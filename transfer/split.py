"""Cutting extents, and joining those that follow each other."""

from collections.abc import Sequence

import numpy as np

from transfer.transport import FEW_ROWS, ExtentRows


def split(extents: ExtentRows, max_nbytes: int) -> ExtentRows:
    """Return the same bytes in the same order, in extents of at most ``max_nbytes``."""
    sizes = extents[:, 2]
    if not len(sizes):
        return extents
    largest = max(sizes.tolist()) if len(sizes) <= FEW_ROWS else sizes.max()
    if largest <= max_nbytes:
        return extents
    counts = -(-extents[:, 2] // max_nbytes)
    rows = np.repeat(extents, counts, axis=0)
    firsts = np.repeat(np.cumsum(counts) - counts, counts)
    offsets = (np.arange(len(rows)) - firsts) * max_nbytes
    rows[:, :2] += offsets[:, np.newaxis]
    rows[:, 2] = np.minimum(rows[:, 2] - offsets, max_nbytes)
    return rows


def joined(parts: Sequence[ExtentRows]) -> ExtentRows:
    """Return ``parts`` as one; where one ends as the next begins, on both sides, they merge."""
    if len(parts) == 1:
        return parts[0]
    return merged(np.concatenate(parts))


def merged(rows: ExtentRows) -> ExtentRows:
    """Return ``rows`` with those made one that follow each other on both sides."""
    follows = (rows[1:, :2] == rows[:-1, :2] + rows[:-1, 2:]).all(axis=1)
    firsts = np.flatnonzero(np.concatenate(([True], ~follows)))
    runs = rows[firsts]
    runs[:, 2] = np.add.reduceat(rows[:, 2], firsts)
    return runs
