"""The source's side of reads by message: answers requests for bytes of the pool.

Over TCP there are no one-sided reads. UCX emulates them, but then a source aborts when a reader is
gone ("unexpected error: Endpoint timeout", ``ucp_request.inl``). So the source sends what it is
asked for through an endpoint of its own that handles errors, and outlives every reader.
"""

import ctypes
import logging
import time
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from transfer.descriptors import Pool
from transfer.refusals import Refusals
from transfer.ucx_bindings import (
    EXACT_TAG,
    FAIL_PEER,
    IN_PROGRESS,
    OK,
    RequestParams,
    TagInfo,
    UcxStatusError,
)
from transfer.ucx_wire import (
    MAX_REQUEST_NBYTES,
    REQUEST_TAG,
    ReadRequest,
    decode_request,
    requested_parts,
)
from transfer.ucx_worker import UcxWorker, scattered_params

log = logging.getLogger(__name__)

_NO_BYTES: Final = np.zeros((1, 2), dtype=np.uint64)


@dataclass(slots=True)
class _Reader:
    """A reader and what is on its way to it. The arrays must live as long as the requests."""

    endpoint: int
    sends: dict[int, NDArray[np.uint64]] = field(default_factory=dict[int, NDArray[np.uint64]])


class PoolServer:
    """Serves the registered pool from one worker. Passive while readers read one-sided."""

    def __init__(self, worker: UcxWorker, pool: Pool, token: bytes) -> None:
        """Begin; ``worker`` is destroyed by ``close``."""
        self.worker = worker
        self._pool = pool
        self._token = token
        self._ucp = worker.context.ucp
        self._readers: dict[bytes, _Reader] = {}
        self._arriving: dict[int, ctypes.Array[ctypes.c_char]] = {}
        self._ending: dict[int, NDArray[np.uint64] | None] = {}
        self._refusals = Refusals()

    @property
    def num_refused(self) -> int:
        """Requests that were dropped, or answered with nothing."""
        return self._refusals.count

    @property
    def num_readers(self) -> int:
        """Readers that were answered by message and have not ended."""
        return len(self._readers)

    def progress(self, *, limit_s: float) -> None:
        """Take requests, send answers, forget readers that have ended, for about ``limit_s``.

        Whatever the worker's progress has brought is looked at before anybody sleeps: UCX tells
        of it once.
        """
        deadline = time.perf_counter() + limit_s
        is_busy = True
        while is_busy:
            is_busy = self.worker.progress(limit_s=limit_s)
            self._take_requests()
            self._read_arrived()
            self._reap()
            is_busy = is_busy or self.worker.needs_progress
            if is_busy and time.perf_counter() >= deadline:
                self.worker.touch()  # ``arm`` refuses, so this is called again
                return

    def close(self) -> None:
        """Stop serving; nothing is sent any more on return."""
        self.worker.destroy()
        self._readers.clear()
        self._arriving.clear()

    def _take_requests(self) -> None:
        probe = self._ucp.short("ucp_tag_probe_nb")
        receive = self._ucp.short("ucp_tag_msg_recv_nbx")
        info, params = TagInfo(), RequestParams(op_attr_mask=RequestParams.NOT_AT_ONCE)
        while True:
            message = probe(self.worker.handle, REQUEST_TAG, EXACT_TAG, 1, ctypes.byref(info))
            if not message:
                return
            nbytes = min(info.length, MAX_REQUEST_NBYTES)
            buffer = ctypes.create_string_buffer(nbytes or 1)
            pointer = receive(self.worker.handle, buffer, nbytes, message, ctypes.byref(params))
            self.worker.touch()
            try:
                request = self._ucp.request(pointer, "request")
            except UcxStatusError:
                self._refuse("not received")
                continue
            if request is not None:
                self._arriving[request] = buffer

    def _read_arrived(self) -> None:
        """Answer requests that are here as a whole."""
        for pointer, buffer in list(self._arriving.items()):
            status = self._status(pointer)
            if status == IN_PROGRESS:
                continue
            self._free(pointer)
            del self._arriving[pointer]
            request = decode_request(buffer.raw, self._token) if status == OK else None
            if request is None:
                self._refuse("malformed, or not made with the pool's token")
                continue
            self._answer(request)

    def _answer(self, request: ReadRequest) -> None:
        blocks = requested_parts(request, self._pool)
        if blocks is None:
            self._refuse("outside of the pool")
            blocks = _NO_BYTES
        try:
            reader = self._reader(request.reader)
            params = scattered_params(self._pool.memory)
            pointer = self._ucp.short("ucp_tag_send_nbx")(
                reader.endpoint, blocks.ctypes.data, len(blocks), request.tag, ctypes.byref(params)
            )
            self.worker.touch()
            sent = self._ucp.request(pointer, "answer")
        except UcxStatusError as error:
            log.debug("reader is gone reason=%s", error)
            return
        if sent is not None:
            reader.sends[sent] = blocks

    def _refuse(self, reason: str) -> None:
        self._refusals.record(reason, now_s=time.monotonic())

    def _reader(self, address: bytes) -> _Reader:
        reader = self._readers.get(address)
        if reader is None:
            reader = _Reader(self.worker.connect(address, FAIL_PEER))
            self._readers[address] = reader
        return reader

    def _reap(self) -> None:
        """Free requests that are over, and close the endpoints of readers that have ended."""
        for reader in self._readers.values():
            for pointer in [at for at in reader.sends if self._status(at) != IN_PROGRESS]:
                self._free(pointer)
                del reader.sends[pointer]
        failed, self.worker.failed_endpoints = self.worker.failed_endpoints, []
        for endpoint, reason in failed:
            self._forget(endpoint, reason)
        for pointer in [at for at in self._ending if self._status(at) != IN_PROGRESS]:
            self._free(pointer)
            del self._ending[pointer]

    def _forget(self, endpoint: int, reason: str) -> None:
        gone = next((at for at, of in self._readers.items() if of.endpoint == endpoint), None)
        if gone is None:
            return
        log.debug("reader has ended reason=%s", reason)
        reader = self._readers.pop(gone)
        closing = self.worker.disconnect(endpoint)
        # Its sends have failed with it; the requests are freed as they say so.
        self._ending.update(reader.sends)
        if closing is not None:
            self._ending[closing] = None

    def _status(self, request: int) -> int:
        return int(self._ucp.short("ucp_request_check_status")(request))

    def _free(self, request: int) -> None:
        self._ucp.short("ucp_request_free")(request)
