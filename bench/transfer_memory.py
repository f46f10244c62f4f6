"""What both sides of ``bench.transfer`` agree on: cases, blocks, memory and its content."""

import mmap
import os
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Placement = Literal["contiguous", "scattered"]

POOL_NBYTES = 136 * 2**20
"""Twice the largest request, and some."""
SCRATCH_NBYTES = 4096
Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Case:
    """One size of a request's KV, and how its blocks lie."""

    nbytes: int
    block_nbytes: int
    placement: Placement

    @property
    def name(self) -> str:
        """In tables and in ratios."""
        kib = self.nbytes // 1024
        size = f"{kib} KB" if kib < 1024 else f"{kib // 1024} MB"  # noqa: PLR2004 - KiB of a MiB
        return f"{size} {self.placement}"

    @property
    def num_blocks(self) -> int:
        """Blocks of one request."""
        return self.nbytes // self.block_nbytes

    def block_ids(self, seed: int, turn: int) -> list[int]:
        """Return blocks of the pool: in order, or with no two that follow each other.

        Each turn goes on where the last one ended: KV that is read lies in no cache of the CPU.
        """
        step = 1 if self.placement == "contiguous" else 2
        span = step * self.num_blocks
        first = turn % (POOL_NBYTES // self.block_nbytes // span) * span
        ids = list(range(first, first + span, step))
        if self.placement == "scattered":
            random.Random(seed).shuffle(ids)
        return ids

    def rows(self, turn: int) -> NDArray[np.int64]:
        """Return [n, 3] of local offset, remote offset, bytes: what a request reads."""
        size = self.block_nbytes
        local, remote = self.block_ids(1, turn), self.block_ids(2, turn)
        if self.placement == "contiguous":
            return np.array([[local[0] * size, remote[0] * size, self.nbytes]], dtype=np.int64)
        return np.array([[a * size, b * size, size] for a, b in zip(local, remote, strict=True)])


_SIZES = ((16, 4), (256, 16), (4096, 64), (65536, 256))
"""KiB of a request, and of one of its blocks."""
CASES = tuple(
    Case(kib * 1024, block_kib * 1024, placement)
    for kib, block_kib in _SIZES
    for placement in ("contiguous", "scattered")
)


def allocate(nbytes: int) -> Bytes:
    """Return memory as a pool has it: private, in huge pages where there are any, touched."""
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    pool = np.frombuffer(memory, dtype=np.uint8)
    pool[:] = 0
    return pool


def share() -> tuple[str, Bytes]:
    """Return memory that another process can open, and the path by which it does."""
    descriptor = os.memfd_create("bench-transfer")
    os.ftruncate(descriptor, POOL_NBYTES)
    path = f"/proc/{os.getpid()}/fd/{descriptor}"
    return path, open_shared(path)


def open_shared(path: str) -> Bytes:
    """Return the memory at ``path``; it lasts while somebody has it open."""
    with Path(path).open("r+b") as file:
        return np.frombuffer(mmap.mmap(file.fileno(), POOL_NBYTES), dtype=np.uint8)


def fill(pool: Bytes) -> None:
    """Give ``pool`` the bytes that every source has."""
    pool[:] = np.random.default_rng(1).integers(0, 256, len(pool), dtype=np.uint8)
