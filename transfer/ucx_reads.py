"""Reading from a peer over UCX in two ways, behind one face; ``transfer.process_reads`` is a third.

One-sided, where the path allows it: each extent is a ``get``, and the source takes no part. By
message otherwise: the source is asked, and sends all extents of a read as one message.
"""

import ctypes
import secrets
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from core.errors import InternalError
from core.ids import ReadId
from transfer.descriptors import Descriptors, Pool, pairs
from transfer.ucx_bindings import (
    EXACT_TAG,
    IN_PROGRESS,
    OK,
    RequestParams,
    TagInfo,
    UcxStatusError,
)
from transfer.ucx_wire import REQUEST_TAG, PoolAddress, ReadRequest, encode_request
from transfer.ucx_worker import MEMORY_TYPES, UcxWorker, scattered_params

_TAG_BITS: Final = 62


class UcxReads(Protocol):
    """Reads of one peer, in a worker of their own."""

    def post(self, read: ReadId, descriptors: Descriptors) -> None:
        """Begin a read.

        Raises:
            UcxStatusError: it cannot be posted, or only a part of it could.
        """
        ...

    def take_landed(self) -> list[ReadId]:
        """Return the reads all of whose bytes have landed since the last call.

        Raises:
            TransferError: a read has failed.
        """
        ...

    def pending(self) -> list[ReadId]:
        """Return the reads that have not landed."""
        ...

    def release(self) -> None:
        """Give back what must not outlive the worker, right before the worker is destroyed."""
        ...


@dataclass(frozen=True, slots=True)
class Window:
    """How much of one-sided reads is given to UCX at a time."""

    nbytes: int
    requests: int


SYNCHRONOUS_WINDOW: Final = Window(nbytes=16 * 2**20, requests=512)
"""Where the bytes are copied by this process itself: what a tear-down has to see through."""
DEVICE_WINDOW: Final = Window(nbytes=256 * 2**20, requests=4096)
_RUN_DOWN_S: Final = 10.0


@dataclass(slots=True)
class _Gets:
    """One read: the extents that are not posted, and the requests of those that are."""

    todo: deque[tuple[int, int, int]]
    posted: deque[tuple[int, int]] = field(default_factory=deque[tuple[int, int]])
    """(request, bytes), oldest first."""


class OneSidedReads:
    """See ``UcxReads``: one ``ucp_get_nbx`` for each extent."""

    def __init__(
        self, worker: UcxWorker, endpoint: int, source: PoolAddress, pool: Pool, window: Window
    ) -> None:
        """Read through ``endpoint`` into ``pool``, the registered one.

        Raises:
            UcxStatusError: the source's key cannot be used.
        """
        ucp = worker.context.ucp
        self._ucp = ucp
        self._worker = worker
        self._endpoint = endpoint
        self._window = window
        unpack = ucp.short("ucp_ep_rkey_unpack")
        self._key = ucp.handle("key of the pool", unpack, endpoint, source.key)
        self._params = RequestParams(
            op_attr_mask=RequestParams.MEMORY_TYPE | RequestParams.MEMORY_HANDLE,
            memory_type=MEMORY_TYPES[pool.memory],
            memh=worker.context.memory,
        )
        self._get: Any = ucp.short("ucp_get_nbx")
        self._status: Any = ucp.short("ucp_request_check_status")
        self._free: Any = ucp.short("ucp_request_free")
        self._reads: dict[ReadId, _Gets] = {}
        self._nbytes = 0
        self._requests = 0

    def post(self, read: ReadId, descriptors: Descriptors) -> None:
        """See ``UcxReads.post``."""
        self._reads[read] = _Gets(deque(descriptors.addresses()))
        self._fill()

    def take_landed(self) -> list[ReadId]:
        """See ``UcxReads.take_landed``."""
        landed: list[ReadId] = []
        for read, gets in self._reads.items():
            self._drop_complete(gets)
            if gets.posted:
                continue
            if gets.todo:
                break
            landed.append(read)
        self._fill()  # If that fails, what has landed is pending still, and fails with the peer.
        for read in landed:
            del self._reads[read]
        return landed

    def pending(self) -> list[ReadId]:
        """See ``UcxReads.pending``."""
        return list(self._reads)

    def release(self) -> None:
        """See ``UcxReads.release``.

        UCX cannot destroy a worker that has copies of local memory outstanding. They are made by
        this process, need nobody else, and are a window at most: they are made.

        Raises:
            InternalError: one did not end.
        """
        deadline = time.monotonic() + _RUN_DOWN_S
        for gets in self._reads.values() if self._window is SYNCHRONOUS_WINDOW else ():
            for request, _ in gets.posted:
                while self._status(request) == IN_PROGRESS:
                    self._worker.progress(limit_s=0)
                    if time.monotonic() > deadline:
                        raise InternalError("a copy from a peer's memory does not end")
                self._free(request)
        self._reads.clear()
        self._ucp.short("ucp_rkey_destroy")(self._key)

    def _fill(self) -> None:
        """Post the oldest extents that are not, as far as the window goes."""
        get, endpoint, key, window = self._get, self._endpoint, self._key, self._window
        params = ctypes.byref(self._params)
        for gets in self._reads.values():
            todo, posted = gets.todo, gets.posted
            while todo:
                if self._nbytes >= window.nbytes or self._requests >= window.requests:
                    return
                local, remote, nbytes = todo.popleft()
                request = get(endpoint, local, nbytes, remote, key, params)
                if request is None:
                    continue
                self._ucp.request(request, "get")
                posted.append((request, nbytes))
                self._nbytes += nbytes
                self._requests += 1
                self._worker.touch()

    def _drop_complete(self, gets: _Gets) -> None:
        """Forget requests that are complete, from the oldest on."""
        status, free, posted = self._status, self._free, gets.posted
        while posted:
            request, nbytes = posted[0]
            result = status(request)
            if result == IN_PROGRESS:
                return
            posted.popleft()
            free(request)
            self._nbytes -= nbytes
            self._requests -= 1
            if result != OK:
                self._ucp.check(result, "get")


@dataclass(slots=True)
class _Message:
    """One read: the receive that its answer fills, and the request for it while it is sent."""

    receive: int
    nbytes: int
    buffers: NDArray[np.uint64]
    request: bytes
    send: int | None = None


class MessageReads:
    """See ``UcxReads``: one request and one answer for each read."""

    def __init__(
        self, worker: UcxWorker, endpoint: int, source: PoolAddress, pool: Pool, base_address: int
    ) -> None:
        """Ask through ``endpoint`` for bytes of the pool that begins at ``base_address``."""
        self._ucp = worker.context.ucp
        self._worker = worker
        self._endpoint = endpoint
        self._address = worker.address()
        self._token = source.token
        self._base = np.uint64(base_address)
        self._params = scattered_params(pool.memory)
        self._params.op_attr_mask |= RequestParams.NOT_AT_ONCE
        # Not guessable, and never that of requests.
        self._first_tag = secrets.randbits(_TAG_BITS) + REQUEST_TAG
        self._messages: dict[ReadId, _Message] = {}

    def post(self, read: ReadId, descriptors: Descriptors) -> None:
        """See ``UcxReads.post``."""
        ucp = self._ucp
        tag = self._first_tag + int(read)
        buffers = pairs(descriptors.local, descriptors.nbytes)
        self._worker.touch()
        pointer = ucp.short("ucp_tag_recv_nbx")(
            self._worker.handle,
            buffers.ctypes.data,
            len(buffers),
            tag,
            EXACT_TAG,
            ctypes.byref(self._params),
        )
        request = encode_request(
            ReadRequest(
                tag=tag,
                reader=self._address,
                extents=pairs(descriptors.remote - self._base, descriptors.nbytes).tobytes(),
            ),
            self._token,
        )
        message = _Message(
            ucp.require_request(pointer, "receive"), descriptors.total_nbytes, buffers, request
        )
        self._messages[read] = message
        pointer = ucp.short("ucp_tag_send_nbx")(
            self._endpoint, request, len(request), REQUEST_TAG, ctypes.byref(RequestParams())
        )
        message.send = ucp.request(pointer, "request")

    def take_landed(self) -> list[ReadId]:
        """See ``UcxReads.take_landed``."""
        landed = [read for read, message in self._messages.items() if self._is_over(message)]
        for read in landed:
            del self._messages[read]
        return landed

    def _is_over(self, message: _Message) -> bool:
        ucp = self._ucp
        if message.send is not None:
            status = ucp.short("ucp_request_check_status")(message.send)
            if status == IN_PROGRESS:
                return False
            ucp.check(status, "request")
            ucp.short("ucp_request_free")(message.send)
            message.send = None
        info = TagInfo()
        status = ucp.short("ucp_tag_recv_request_test")(message.receive, ctypes.byref(info))
        if status == IN_PROGRESS:
            return False
        ucp.check(status, "answer")
        ucp.short("ucp_request_free")(message.receive)
        if info.length != message.nbytes:
            raise UcxStatusError(f"the source sent {info.length} of {message.nbytes} bytes")
        return True

    def pending(self) -> list[ReadId]:
        """See ``UcxReads.pending``."""
        return list(self._messages)

    def release(self) -> None:
        """See ``UcxReads.release``."""
