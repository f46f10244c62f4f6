"""The source's side of ``ucxx_transport``: answers requests for bytes of the pool."""

import logging
import time
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from transfer.descriptors import Pool
from transfer.refusals import Refusals
from transfer.ucx_wire import (
    MAX_REQUEST_NBYTES,
    REQUEST_TAG,
    ReadRequest,
    decode_request,
    requested_parts,
)
from transfer.ucxx_bindings import Bindings, Endpoint, Request, Worker

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Reader:
    """A reader and what is on its way to it."""

    endpoint: Endpoint
    sends: list[Request] = field(default_factory=list[Request])


class UcxxPoolServer:
    """Serves the registered pool: each extent of a request is a message of its own."""

    def __init__(self, bindings: Bindings, worker: Worker, pool: Pool, token: bytes) -> None:
        self._bindings = bindings
        self.worker = worker
        self._pool = pool
        self._token = token
        self._readers: dict[bytes, _Reader] = {}
        self._refusals = Refusals()
        self._arriving: list[tuple[Request, NDArray[np.uint8]]] = []

    def serve(self) -> None:
        """Take requests, send answers, forget readers that have ended. After progress."""
        tag = self._bindings.tag(REQUEST_TAG)
        while (probe := self.worker.tag_probe(tag, remove=True)).matched:
            message = np.zeros(min(probe.length, MAX_REQUEST_NBYTES), dtype=np.uint8)
            buffer = self._bindings.buffer(message)
            self._arriving.append((self.worker.tag_recv_with_handle(buffer, probe), message))
        here = [arrived for arrived in self._arriving if arrived[0].completed]
        self._arriving = [arriving for arriving in self._arriving if not arriving[0].completed]
        for _, message in here:
            request = decode_request(message.tobytes(), self._token)
            if request is None:
                self._refuse("malformed, or not made with the pool's token")
                continue
            self._answer(request)
        for address, reader in list(self._readers.items()):
            reader.sends = [send for send in reader.sends if not send.completed]
            if not reader.endpoint.alive:
                del self._readers[address]

    def _answer(self, request: ReadRequest) -> None:
        parts = requested_parts(request, self._pool)
        if parts is None:
            self._refuse("outside of the pool")
            return
        bindings = self._bindings
        try:
            reader = self._readers.get(request.reader)
            if reader is None:
                reader = _Reader(bindings.connect(self.worker, request.reader))
                self._readers[request.reader] = reader
            for index, (address, nbytes) in enumerate(parts.tolist()):
                part = bindings.part(self._pool, address, nbytes)
                reader.sends.append(
                    reader.endpoint.tag_send(part, bindings.tag(request.tag + index))
                )
        except bindings.errors as error:
            log.debug("reader is gone reason=%s", error)

    def _refuse(self, reason: str) -> None:
        self._refusals.record(reason, now_s=time.monotonic())
