"""Two ways to read from a peer over UCX, behind one face.

One-sided, where the path allows it: each extent is a ``get``, and the source takes no part. By
message otherwise: the source is asked, and sends all extents of a read as one message.
"""

import ctypes
import secrets
from collections import deque
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from core.ids import ReadId
from transfer.descriptors import Descriptors, Pool
from transfer.ucx_bindings import (
    EXACT_TAG,
    IN_PROGRESS,
    RequestParams,
    TagInfo,
    UcxStatusError,
)
from transfer.ucx_wire import REQUEST_TAG, PoolAddress, ReadRequest, encode_request
from transfer.ucx_worker import MEMORY_TYPES, UcxWorker, pairs, scattered_params

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
            UcxStatusError: a read has failed.
        """
        ...

    def pending(self) -> list[ReadId]:
        """Return the reads that have not landed."""
        ...

    def release(self) -> None:
        """Give back what outlives the worker. Called right before the worker is destroyed."""
        ...


class OneSidedReads:
    """See ``UcxReads``: one ``ucp_get_nbx`` for each extent."""

    def __init__(
        self, worker: UcxWorker, endpoint: int, source: PoolAddress, pool: Pool, memory: int
    ) -> None:
        """Read through ``endpoint`` into ``pool``, whose registration is ``memory``.

        Raises:
            UcxStatusError: the source's key cannot be used.
        """
        ucp = worker.context.ucp
        self._ucp = ucp
        self._worker = worker
        self._endpoint = endpoint
        unpack = ucp.short("ucp_ep_rkey_unpack")
        self._key = ucp.handle("key of the pool", unpack, endpoint, source.key)
        self._params = RequestParams(
            op_attr_mask=RequestParams.MEMORY_TYPE | RequestParams.MEMORY_HANDLE,
            memory_type=MEMORY_TYPES[pool.memory],
            memh=memory,
        )
        self._get: Any = ucp.short("ucp_get_nbx")
        self._status: Any = ucp.short("ucp_request_check_status")
        self._free: Any = ucp.short("ucp_request_free")
        self._reads: dict[ReadId, deque[int]] = {}

    def post(self, read: ReadId, descriptors: Descriptors) -> None:
        """See ``UcxReads.post``."""
        requests: deque[int] = deque()
        self._reads[read] = requests
        get, endpoint, key, params = self._get, self._endpoint, self._key, self._params
        by_reference = ctypes.byref(params)
        self._worker.touch()
        for local, remote, nbytes in zip(
            descriptors.local.tolist(),
            descriptors.remote.tolist(),
            descriptors.nbytes.tolist(),
            strict=True,
        ):
            pointer = get(endpoint, local, nbytes, remote, key, by_reference)
            if pointer is not None:
                requests.append(pointer)
                self._ucp.require_request(pointer, "get")

    def take_landed(self) -> list[ReadId]:
        """See ``UcxReads.take_landed``."""
        landed = [read for read, requests in self._reads.items() if self._is_over(requests)]
        for read in landed:
            del self._reads[read]
        return landed

    def _is_over(self, requests: deque[int]) -> bool:
        """Drop requests that are complete, from the oldest on."""
        status, free = self._status, self._free
        while requests:
            result = status(requests[0])
            if result == IN_PROGRESS:
                return False
            free(requests.popleft())
            self._ucp.check(result, "get")
        return True

    def pending(self) -> list[ReadId]:
        """See ``UcxReads.pending``."""
        return list(self._reads)

    def release(self) -> None:
        """See ``UcxReads.release``."""
        self._ucp.short("ucp_rkey_destroy")(self._key)


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
                token=self._token,
                tag=tag,
                reader=self._address,
                extents=pairs(descriptors.remote - self._base, descriptors.nbytes).tobytes(),
            )
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
