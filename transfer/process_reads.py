"""Reads out of the memory of another process on this host, many extents in one system call.

UCX makes the same call (``process_vm_readv``, its ``cma``), but one for each extent, with a request
around each: more than half of what a page costs to read. The kernel copies within the call, so when
it returns nothing of it is written any more, and a tear-down has nothing to wait for.
"""

import ctypes
import os
import select
import time
from array import array
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from core.errors import TransferError
from core.ids import ReadId
from transfer.descriptors import Descriptors, Pool, describe
from transfer.memory_owners import MemoryOwner, pid_namespace, started_at
from transfer.split import split
from transfer.transport import FEW_ROWS, Extent, ExtentRows
from transfer.ucx_worker import UcxWorker

MAX_CALL_NBYTES: Final = 2 * 2**20
"""Of one call, in which nothing can be cancelled: 0.2 to 0.5 ms."""
MAX_CALL_EXTENTS: Final = 1024
"""``UIO_MAXIOV`` of Linux."""
_IOVEC_NBYTES: Final = 16
_TURN_S: Final = 0.001
"""For how long ``take_landed`` keeps its caller, and one call more."""


class SourceMemoryError(TransferError):
    """The memory of a source cannot be read, or not any more."""


@dataclass(slots=True)
class _Copy:
    """One read: where from and where to, and the calls that are still to be made."""

    vectors: "NDArray[np.int64] | array[int]"
    """[2, n, 2]: here and there, an array of ``struct iovec`` each."""
    here: int
    there: int
    """Addresses of the two."""
    calls: deque[tuple[int, int, int]]
    """First extent, extents, bytes."""


class ProcessReads:
    """See ``UcxReads``: the bytes are copied in ``take_landed``, and nowhere else."""

    def __init__(self, worker: UcxWorker, owner: MemoryOwner, source: Pool) -> None:
        """Read the memory of ``owner``, after a byte of ``source`` was read on trial.

        Raises:
            OSError: it has ended, or may not be read by this process.
        """
        self._worker = worker
        self._pid = owner.pid
        library = ctypes.CDLL(None, use_errno=True)
        self._read: Any = library.process_vm_readv
        self._read.restype = ctypes.c_ssize_t
        self._read.argtypes = (
            ctypes.c_int, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_void_p, ctypes.c_ulong,
            ctypes.c_ulong,
        )  # fmt: skip
        self._copies: dict[ReadId, _Copy] = {}
        self._process = os.pidfd_open(owner.pid)
        self._ended = select.poll()
        self._ended.register(self._process, select.POLLIN)
        try:
            # In this order: from the opening on the number is that of nobody else, or it has ended.
            _require_same(owner)
            byte = ctypes.create_string_buffer(1)
            to, of = Pool(ctypes.addressof(byte), 1), source
            self._copy(_copy_of(describe([Extent(0, 0, 1)], to, of)))
        except BaseException:
            os.close(self._process)
            raise

    def post(self, read: ReadId, descriptors: Descriptors) -> None:
        """See ``UcxReads.post``: no byte is read here."""
        self._copies[read] = _copy_of(descriptors)
        self._worker.touch()

    def take_landed(self) -> list[ReadId]:
        """See ``UcxReads.take_landed``: copies until all is here, or the turn is over.

        Raises:
            SourceMemoryError: the source has ended, or has given its pool back.
        """
        try:
            landed = list(self._advance())
        except OSError as error:
            raise SourceMemoryError(f"the source's memory: {error}") from error
        for read in landed:
            del self._copies[read]
        if self._copies:
            self._worker.touch()  # No event will tell that there is more to do.
        return landed

    def pending(self) -> list[ReadId]:
        """See ``UcxReads.pending``."""
        return list(self._copies)

    def release(self) -> None:
        """See ``UcxReads.release``."""
        self._copies.clear()
        os.close(self._process)

    def _advance(self) -> Iterator[ReadId]:
        """Make calls, at least one, until the turn is over; yield the reads that need no more."""
        turn_ends_at = time.perf_counter() + _TURN_S
        is_over = False
        for read, copy in self._copies.items():
            while copy.calls and not is_over:
                self._copy(copy)
                is_over = time.perf_counter() >= turn_ends_at
            if not copy.calls:
                yield read
            if is_over:
                return

    def _copy(self, copy: _Copy) -> None:
        """Make the next call of ``copy``.

        Raises:
            OSError: not all of its bytes are here, or they may be those of another process.
        """
        first, count, nbytes = copy.calls.popleft()
        at = first * _IOVEC_NBYTES
        copied = self._read(self._pid, copy.here + at, count, copy.there + at, count, 0)
        if copied < 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        if copied != nbytes:
            raise OSError(f"only {copied} of {nbytes} bytes are there")
        if self._ended.poll(0):
            raise ProcessLookupError(f"process {self._pid} has ended")


def open_process_reads(
    worker: UcxWorker, owner: MemoryOwner | None, source: Pool
) -> ProcessReads | None:
    """Return what reads ``source`` out of the memory of ``owner``; None: this process cannot."""
    try:
        if owner is None or owner.pid_namespace != pid_namespace():
            return None
        return ProcessReads(worker, owner, source)
    except (OSError, AttributeError, ValueError, IndexError):
        return None  # It has ended, forbids it, or this system has no such call.


def _copy_of(descriptors: Descriptors) -> _Copy:
    """Return what is to be done for ``descriptors``, by a loop where that is faster."""
    rows = split(descriptors.rows, MAX_CALL_NBYTES)
    to, of = descriptors.local_base, descriptors.remote_base
    vectors: NDArray[np.int64] | array[int]
    if len(rows) <= FEW_ROWS:
        here: list[int] = []
        there: list[int] = []
        for local, remote, nbytes in rows.tolist():
            here += (to + local, nbytes)
            there += (of + remote, nbytes)
        vectors = array("q", here + there)
        address, _ = vectors.buffer_info()
    else:
        vectors = np.empty((2, len(rows), 2), dtype=np.int64)
        vectors[0, :, 0] = rows[:, 0] + to
        vectors[1, :, 0] = rows[:, 1] + of
        vectors[:, :, 1] = rows[:, 2]
        address = vectors.ctypes.data
    return _Copy(vectors, address, address + len(rows) * _IOVEC_NBYTES, deque(_calls(rows)))


def _calls(rows: ExtentRows) -> Iterator[tuple[int, int, int]]:
    """Yield (first extent, extents, bytes) of each call, none above the limits of one."""
    sizes: list[int] = rows[:, 2].tolist()
    first = nbytes = 0
    for at, size in enumerate(sizes):
        if at > first and (nbytes + size > MAX_CALL_NBYTES or at - first == MAX_CALL_EXTENTS):
            yield first, at - first, nbytes
            first, nbytes = at, 0
        nbytes += size
    yield first, len(sizes) - first, nbytes


def _require_same(owner: MemoryOwner) -> None:
    if started_at(owner.pid) != owner.started_at:
        raise ProcessLookupError(f"process {owner.pid} is another by now")
