"""What a read names, checked against both pools, as arrays of addresses."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from core.errors import TransferError
from transfer.transport import Extents, MemoryKind, rows_of


@dataclass(frozen=True, slots=True)
class Pool:
    """A registered range, of this process or of a peer."""

    address: int
    nbytes: int
    memory: MemoryKind = "host"


@dataclass(frozen=True, slots=True)
class Descriptors:
    """One entry for each extent: [n] uint64 each."""

    local: NDArray[np.uint64]
    remote: NDArray[np.uint64]
    nbytes: NDArray[np.uint64]

    @property
    def total_nbytes(self) -> int:
        """Bytes of all of them."""
        return int(self.nbytes.sum())


def describe(extents: Extents, local: Pool, remote: Pool) -> Descriptors:
    """Return the addresses of ``extents`` in both pools.

    Raises:
        TransferError: there is no extent, or one is outside of a pool.
    """
    rows = rows_of(extents)
    if not len(rows):
        raise TransferError("a read needs at least one extent")
    sizes = rows[:, 2]
    for offsets, pool in ((rows[:, 0], local), (rows[:, 1], remote)):
        _require_inside(offsets, sizes, pool)
    columns = rows.T.astype(np.uint64)
    return Descriptors(columns[0] + local.address, columns[1] + remote.address, columns[2])


def pairs(addresses: NDArray[np.uint64], sizes: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return [n, 2] of address, bytes: an array of ``ucp_dt_iov_t``."""
    return np.ascontiguousarray(np.stack([addresses, sizes], axis=1))


def _require_inside(offsets: NDArray[np.int64], sizes: NDArray[np.int64], pool: Pool) -> None:
    outside = (offsets < 0) | (sizes <= 0) | (offsets > pool.nbytes - sizes)
    if outside.any():
        first = int(outside.argmax())
        raise TransferError(
            f"extent of {sizes[first]} bytes at {offsets[first]} is outside of {pool.nbytes} bytes"
        )
