"""``Transport`` over ucxx: its Python interface has messages only, so the source takes part.

A read is one request, and one answer for each extent. Endpoints must handle errors, or the end of a
source would not be noticed; UCX then offers them TCP only, on one host too. Each peer has a worker
of its own, whose end is the proof: ``docs/decisions/0012-which-ucx-binding.md``.
"""

import itertools
import logging
import secrets
import select
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from core.errors import ConfigError, InternalError, PeerLostError, TransferError
from core.ids import Incarnation, ReadId
from core.messages import PoolEndpoint
from transfer.descriptors import Pool, describe, pairs
from transfer.pool_checks import require_new_pool, require_same_transport
from transfer.transport import Extents, MemoryKind, Path, ReadOutcome
from transfer.ucx_wire import (
    TOKEN_NBYTES,
    PoolAddress,
    ReadRequest,
    boot_id,
    decode_address,
    encode_address,
    encode_request,
)
from transfer.ucxx_bindings import Endpoint, Request, Worker, load_ucxx
from transfer.ucxx_serving import UcxxPoolServer

log = logging.getLogger(__name__)

_TURN_S: Final = 0.001
_TAG_BITS: Final = 62


@dataclass(slots=True)
class _Peer:
    """Everything of one peer. The worker has no other owner: dropping this ends all its reads."""

    worker: Worker
    endpoint: Endpoint
    source: PoolAddress
    address: bytes
    pool: Pool
    descriptor: int
    next_tag: int
    reads: dict[ReadId, list[Request]] = field(default_factory=dict[ReadId, list[Request]])
    requests: list[tuple[Request, object]] = field(default_factory=list[tuple[Request, object]])


class UcxxTransport:
    """See ``Transport``. Destination of every read is the registered pool itself."""

    name = "ucxx"

    def __init__(
        self, incarnation: Incarnation, *, ucx_options: Mapping[str, str] | None = None
    ) -> None:
        """Load ucxx and open its devices.

        Args:
            incarnation: Of this process.
            ucx_options: UCX settings of this instance without their ``UCX_`` prefix.

        Raises:
            ConfigError: ucxx cannot be loaded, or a setting is wrong.
        """
        self._incarnation = incarnation
        self._bindings = load_ucxx()
        try:
            self._context = self._bindings.context(ucx_options or {})
        except self._bindings.errors as error:
            raise ConfigError(f"transport ucxx: {error}; check the UCX_ variables") from error
        self._major = int(self._bindings.version.split(".", 1)[0])
        self._pool: Pool | None = None
        self._server: UcxxPoolServer | None = None
        self._token = secrets.token_bytes(TOKEN_NBYTES)
        self._peers: dict[Incarnation, _Peer] = {}
        self._ready = select.epoll()
        self._read_ids = itertools.count(1)
        self._unreported: list[ReadOutcome] = []

    @property
    def wake_descriptor(self) -> int:
        """See ``Transport.wake_descriptor``."""
        return self._ready.fileno()

    def arm(self) -> bool:
        """See ``Transport.arm``."""
        if self._unreported or self._server is None:
            return False
        workers = [self._server.worker, *(target.worker for target in self._peers.values())]
        # UCX tells of no work that it holds back until the next progress: that has to find nothing.
        return all(not worker.progress_once() and worker.arm() for worker in workers)

    def register(self, address: int, nbytes: int, *, memory: MemoryKind = "host") -> None:
        """See ``Transport.register``. Messages need no registration."""
        require_new_pool(self.name, self._pool, address, nbytes)
        worker = self._bindings.worker(self._context)
        self._pool = Pool(address, nbytes, memory)
        self._server = UcxxPoolServer(self._bindings, worker, self._pool, self._token)
        self._ready.register(worker.epoll_file_descriptor, select.EPOLLIN)

    def endpoint(self) -> PoolEndpoint:
        """See ``Transport.endpoint``."""
        pool, server = self._registered()
        address = bytes(server.worker.address.tobytes())
        return PoolEndpoint(
            transport=self.name,
            metadata=encode_address(PoolAddress(self._major, boot_id(), address, b"", self._token)),
            base_address=pool.address,
            nbytes=pool.nbytes,
        )

    def connect(self, peer: Incarnation, endpoint: PoolEndpoint) -> None:
        """See ``Transport.connect``."""
        if peer in self._peers:
            return
        require_same_transport(self.name, peer, endpoint)
        pool, _ = self._registered()
        source = decode_address(endpoint.metadata)
        bindings = self._bindings
        try:
            worker = bindings.worker(self._context)
            to_source = bindings.connect(worker, source.worker)
        except bindings.errors as error:
            raise TransferError(f"peer {peer}: its endpoint cannot be used: {error}") from error
        self._peers[peer] = _Peer(
            worker,
            to_source,
            source,
            bytes(worker.address.tobytes()),
            Pool(endpoint.base_address, endpoint.nbytes, pool.memory),
            worker.epoll_file_descriptor,
            next_tag=secrets.randbits(_TAG_BITS) + 2,
        )
        self._ready.register(worker.epoll_file_descriptor, select.EPOLLIN)

    def is_connected(self, peer: Incarnation) -> bool:
        """See ``Transport.is_connected``."""
        return peer in self._peers

    def path(self, peer: Incarnation) -> Path:
        """See ``Transport.path``."""
        if peer not in self._peers:
            raise PeerLostError(f"peer {peer} is not connected")
        return Path("tcp", "ucxx by message")

    def read(self, peer: Incarnation, extents: Extents) -> ReadId:
        """See ``Transport.read``."""
        target = self._peers.get(peer)
        if target is None:
            raise PeerLostError(f"peer {peer} is not connected")
        pool, _ = self._registered()
        wanted = describe(extents, pool, target.pool)
        read = ReadId(next(self._read_ids))
        bindings, first_tag = self._bindings, target.next_tag
        target.next_tag += len(extents)
        message = np.frombuffer(
            encode_request(
                ReadRequest(
                    tag=first_tag,
                    reader=target.address,
                    extents=pairs(
                        wanted.remote - np.uint64(target.pool.address), wanted.nbytes
                    ).tobytes(),
                ),
                target.source.token,
            ),
            dtype=np.uint8,
        ).copy()
        try:
            target.reads[read] = [
                target.worker.tag_recv(
                    bindings.part(pool, address, nbytes), bindings.tag(first_tag + index)
                )
                for index, (address, nbytes) in enumerate(
                    pairs(wanted.local, wanted.nbytes).tolist()
                )
            ]
            request = target.endpoint.tag_send(bindings.buffer(message), bindings.tag(1))
            target.requests.append((request, message))
        except bindings.errors as error:
            del target
            self._fail_peer(peer, f"post failed: {error}", posting=read)
            raise PeerLostError(f"peer {peer}: post failed: {error}") from error
        return read

    def poll(self) -> list[ReadOutcome]:
        """See ``Transport.poll``."""
        for peer in list(self._peers):
            failure = self._poll_peer(peer)
            if failure is not None:
                self._fail_peer(peer, failure)
        outcomes, self._unreported = self._unreported, []
        return outcomes

    def tear_down(self, peer: Incarnation) -> list[ReadId]:
        """See ``Transport.tear_down``.

        Raises:
            InternalError: the peer's UCX worker lives on, so nothing is proven.
        """
        target = self._peers.pop(peer, None)
        if target is None:
            return []
        reads, descriptor, worker = list(target.reads), target.descriptor, target.worker
        target.endpoint.close_blocking()
        del target
        # Requests refer to their worker until they have been told that they are cancelled.
        worker.cancel_inflight_requests()
        _progress(worker)
        del worker
        if self._is_watched(descriptor):
            raise InternalError(f"the worker of peer {peer} is still referenced after tear-down")
        return reads

    def progress(self) -> None:
        """See ``Transport.progress``."""
        _, server = self._registered()
        _progress(server.worker)
        server.serve()

    def close(self) -> None:
        """See ``Transport.close``."""
        for peer in list(self._peers):
            self.tear_down(peer)
        self._unreported.clear()
        self._server = None
        self._pool = None
        self._ready.close()

    def _is_watched(self, descriptor: int) -> bool:
        """Whether the worker with this descriptor is alive; it is not watched any more, either way.

        The descriptor closes with the worker, and the kernel forgets a closed one by itself, even
        if its number is in use again.
        """
        try:
            self._ready.unregister(descriptor)
        except OSError:
            return False
        return True

    def _registered(self) -> tuple[Pool, UcxxPoolServer]:
        if self._pool is None or self._server is None:
            raise InternalError("transport ucxx is used before register, or after close")
        return self._pool, self._server

    def _poll_peer(self, peer: Incarnation) -> str | None:
        """Record the peer's completed reads; return why one failed, or None."""
        target = self._peers[peer]
        _progress(target.worker)
        try:
            for read, requests in list(target.reads.items()):
                if all(request.completed for request in reversed(requests)):
                    for request in requests:
                        request.check_error()
                    del target.reads[read]
                    self._unreported.append(ReadOutcome(read, peer))
            for request, _ in target.requests:
                if request.completed:
                    request.check_error()
            target.requests = [sent for sent in target.requests if not sent[0].completed]
        except self._bindings.errors as error:
            return str(error)
        return None if target.endpoint.alive else "the source has ended"

    def _fail_peer(self, peer: Incarnation, reason: str, *, posting: ReadId | None = None) -> None:
        reads = [read for read in self.tear_down(peer) if read != posting]
        log.warning("peer lost incarnation=%s reads=%d reason=%s", peer, len(reads), reason)
        self._unreported.extend(ReadOutcome(read, peer, failure=reason) for read in reads)


def _progress(worker: Worker) -> None:
    deadline = time.perf_counter() + _TURN_S
    while worker.progress_once() and time.perf_counter() < deadline:
        pass
