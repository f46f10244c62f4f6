"""What a read names, checked against both pools, as arrays of addresses."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from core.errors import TransferError
from transfer.transport import FEW_ROWS, ExtentRows, Extents, MemoryKind, rows_of


@dataclass(frozen=True, slots=True)
class Pool:
    """A registered range, of this process or of a peer."""

    address: int
    nbytes: int
    memory: MemoryKind = "host"


@dataclass(frozen=True, slots=True)
class Descriptors:
    """Extents that are inside of both pools, as addresses."""

    rows: ExtentRows
    local_base: int
    remote_base: int

    @property
    def local(self) -> NDArray[np.uint64]:
        """[n]: where the bytes go."""
        return self.rows[:, 0].astype(np.uint64) + np.uint64(self.local_base)

    @property
    def remote(self) -> NDArray[np.uint64]:
        """[n]: where they come from."""
        return self.rows[:, 1].astype(np.uint64) + np.uint64(self.remote_base)

    @property
    def nbytes(self) -> NDArray[np.uint64]:
        """[n]: how many."""
        return self.rows[:, 2].astype(np.uint64)

    @property
    def total_nbytes(self) -> int:
        """Bytes of all of them."""
        return int(self.rows[:, 2].sum())

    def addresses(self) -> list[tuple[int, int, int]]:
        """Return (local address, remote address, bytes) of each, for one call at a time."""
        to, of = self.local_base, self.remote_base
        return [(to + local, of + remote, nbytes) for local, remote, nbytes in self.rows.tolist()]


def describe(extents: Extents, local: Pool, remote: Pool) -> Descriptors:
    """Return the addresses of ``extents`` in both pools.

    Raises:
        TransferError: there is no extent, or one is outside of a pool.
    """
    rows = rows_of(extents)
    if not len(rows):
        raise TransferError("a read needs at least one extent")
    if len(rows) > FEW_ROWS or not _are_inside(rows, local, remote):
        for side, pool in enumerate((local, remote)):
            _require_inside(rows[:, side], rows[:, 2], pool)
    return Descriptors(rows, local.address, remote.address)


def _are_inside(rows: ExtentRows, local: Pool, remote: Pool) -> bool:
    """Whether ``_require_inside`` has nothing to say: a fifth of its time, for few rows."""
    ends = local.nbytes, remote.nbytes
    return all(
        0 <= to <= ends[0] - nbytes and 0 <= of <= ends[1] - nbytes and nbytes > 0
        for to, of, nbytes in rows.tolist()
    )


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
