"""``Transport`` over libucp itself: RDMA, shared memory or TCP, whichever UCX finds.

One worker serves the pool, and **each peer that is read from has a
worker of its own**: destroying a worker is the proof that its reads are over.

Where the path is one-sided, the source's memory is read without it. On one host that needs an
endpoint without error handling (with it, UCX falls back to TCP); such a read still fails by itself
when the source has died. Where UCX would copy by ``cma``, ``transfer.process_reads`` does.
Between hosts endpoints handle errors. Where there is only TCP, the source is asked and answers by
message: ``transfer.ucx_serving`` says why.

``docs/decisions/0012-which-ucx-binding.md`` has the figures.
"""

import itertools
import logging
import secrets
import select
import time
from collections.abc import Mapping
from typing import Final

from core.errors import ConfigError, InternalError, PeerLostError, TransferError
from core.ids import Incarnation, ReadId
from core.messages import PoolEndpoint
from transfer.descriptors import Pool, describe
from transfer.memory_owners import this_process
from transfer.pool_checks import require_new_pool, require_same_transport
from transfer.transport import Extents, MemoryKind, Path, ReadOutcome
from transfer.ucx_bindings import Ucp, UcxStatusError
from transfer.ucx_contexts import UcxContexts
from transfer.ucx_library import load_ucx
from transfer.ucx_peers import UcxPeer, open_peer
from transfer.ucx_serving import PoolServer
from transfer.ucx_wire import TOKEN_NBYTES, PoolAddress, boot_id, decode_address, encode_address
from transfer.ucx_worker import UcxWorker

log = logging.getLogger(__name__)

UCX_OPTIONS: Final[Mapping[str, str]] = {
    # Messages at once and without a copy: 2.2 GB/s over loopback TCP instead of 1.3.
    "RNDV_THRESH": "inf",
    "ZCOPY_THRESH": "0",
    "TCP_TX_SEG_SIZE": "64k",
    "TCP_RX_SEG_SIZE": "256k",
    # Segments (512 KiB each) that one call of progress copies.
    "CMA_TX_QUOTA": "16",
}
_TURN_S: Final = 0.001
"""For how long one call keeps its caller, for each worker with bytes to move."""


class UcxTransport:
    """See ``Transport``. Destination of every read is the registered pool itself."""

    def __init__(
        self, incarnation: Incarnation, *, ucx_options: Mapping[str, str] | None = None
    ) -> None:
        """Load UCX and open its devices.

        Args:
            incarnation: Of this process.
            ucx_options: UCX settings of this instance without their ``UCX_`` prefix, such as
                ``{"TLS": "tcp"}``. An environment variable of the same name wins.

        Raises:
            ConfigError: UCX cannot be loaded, or a setting is wrong.
        """
        self._incarnation = incarnation
        self._library = load_ucx()
        self._contexts = UcxContexts(Ucp(self._library), {**UCX_OPTIONS, **(ucx_options or {})})
        self._is_open = True
        self._host = boot_id()
        self._pool: Pool | None = None
        self._address: PoolAddress | None = None
        self._server: PoolServer | None = None
        self._peers: dict[Incarnation, UcxPeer] = {}
        self._ready = select.epoll()
        self._read_ids = itertools.count(1)
        self._unreported: list[ReadOutcome] = []

    @property
    def name(self) -> str:
        """See ``Transport.name``."""
        return "ucx"

    @property
    def version(self) -> str:
        """Version of the loaded UCX, and where it was found."""
        return f"{self._library.version} ({self._library.path})"

    @property
    def wake_descriptor(self) -> int:
        """See ``Transport.wake_descriptor``: readable while any worker's own descriptor is."""
        return self._ready.fileno()

    def arm(self) -> bool:
        """See ``Transport.arm``."""
        if self._unreported or self._server is None:
            return False
        return all(worker.arm() for worker in self._workers(self._server))

    def register(self, address: int, nbytes: int, *, memory: MemoryKind = "host") -> None:
        """See ``Transport.register``."""
        require_new_pool(self.name, self._pool, address, nbytes)
        pool = Pool(address, nbytes, memory)
        try:
            key = self._contexts.register(address, nbytes, memory)
            worker = self._contexts.messages.open_worker()
            worker_address = worker.address()
        except UcxStatusError as error:
            raise ConfigError(
                f"transport ucx: a pool of {nbytes} bytes of {memory} memory cannot be registered "
                f"({error}); check UCX_TLS, and the memlock limit where RDMA is used"
            ) from error
        token = secrets.token_bytes(TOKEN_NBYTES)
        self._address = PoolAddress(
            self._library.major, self._host, worker_address, key, token, this_process()
        )
        self._server = PoolServer(worker, pool, token)
        self._ready.register(worker.descriptor, select.EPOLLIN)
        self._pool = pool

    def endpoint(self) -> PoolEndpoint:
        """See ``Transport.endpoint``."""
        pool, address = self._registered()
        return PoolEndpoint(
            transport=self.name,
            metadata=encode_address(address),
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
        if source.ucx_major != self._library.major:
            raise TransferError(
                f"peer {peer} runs UCX {source.ucx_major}.x, here it is {self._library.version}"
            )
        try:
            is_local = bool(self._host) and source.host == self._host
            target = open_peer(self._contexts, source, endpoint, pool, is_local=is_local)
        except UcxStatusError as error:
            raise TransferError(f"peer {peer}: its endpoint cannot be used: {error}") from error
        self._peers[peer] = target
        self._ready.register(target.worker.descriptor, select.EPOLLIN)
        log.info("peer connected incarnation=%s path=%s", peer, target.path.description)

    def is_connected(self, peer: Incarnation) -> bool:
        """See ``Transport.is_connected``."""
        return peer in self._peers

    def path(self, peer: Incarnation) -> Path:
        """See ``Transport.path``."""
        return self._connected(peer).path

    def read(self, peer: Incarnation, extents: Extents) -> ReadId:
        """See ``Transport.read``."""
        target = self._connected(peer)
        pool, _ = self._registered()
        descriptors = describe(extents, pool, target.pool)
        read = ReadId(next(self._read_ids))
        try:
            target.reads.post(read, descriptors)
        except UcxStatusError as error:
            # A part may be posted: only the end of the worker proves otherwise.
            self._fail_peer(peer, f"post failed: {error}", posting=read)
            raise PeerLostError(f"peer {peer}: post failed: {error}") from error
        return read

    def poll(self) -> list[ReadOutcome]:
        """See ``Transport.poll``."""
        woken = {descriptor for descriptor, _ in self._ready.poll(0)}
        for peer, target in list(self._peers.items()):
            worker = target.worker
            if worker.descriptor in woken or worker.needs_progress or target.reads.pending():
                self._poll_peer(peer, target)
        outcomes, self._unreported = self._unreported, []
        return outcomes

    def tear_down(self, peer: Incarnation) -> list[ReadId]:
        """See ``Transport.tear_down``."""
        target = self._peers.pop(peer, None)
        if target is None:
            return []
        self._ready.unregister(target.worker.descriptor)
        reads = target.reads.pending()
        target.destroy()
        return reads

    def progress(self) -> None:
        """See ``Transport.progress``. Costs nothing but the call while nobody asks."""
        if self._server is None:
            raise InternalError("transport ucx is used before register, or after close")
        self._server.progress(limit_s=_TURN_S)

    def close(self) -> None:
        """See ``Transport.close``."""
        if not self._is_open:
            return
        self._is_open = False
        for peer in list(self._peers):
            self.tear_down(peer)
        self._unreported.clear()
        if self._server is not None:
            self._ready.unregister(self._server.worker.descriptor)
            self._server.close()
        self._server = None
        self._pool = None
        self._contexts.close()
        self._ready.close()

    def _registered(self) -> tuple[Pool, PoolAddress]:
        if self._pool is None or self._address is None:
            raise InternalError("transport ucx is used before register, or after close")
        return self._pool, self._address

    def _connected(self, peer: Incarnation) -> UcxPeer:
        target = self._peers.get(peer)
        if target is None:
            raise PeerLostError(f"peer {peer} is not connected")
        return target

    def _workers(self, server: PoolServer) -> list[UcxWorker]:
        return [server.worker, *(target.worker for target in self._peers.values())]

    def _poll_peer(self, peer: Incarnation, target: UcxPeer) -> None:
        """Record the peer's completed reads; fail it if one failed, or if it has ended."""
        deadline = time.perf_counter() + _TURN_S
        is_busy = True
        while is_busy and time.perf_counter() < deadline:
            is_busy = target.worker.progress(limit_s=_TURN_S)
            try:
                landed = target.reads.take_landed()
            except TransferError as error:
                self._fail_peer(peer, str(error))
                return
            self._unreported.extend(ReadOutcome(read, peer) for read in landed)
        if target.worker.failed_endpoints:
            _, reason = target.worker.failed_endpoints[0]
            self._fail_peer(peer, reason)

    def _fail_peer(self, peer: Incarnation, reason: str, *, posting: ReadId | None = None) -> None:
        """Tear a peer down and report its reads, but not the one that ``read`` is posting."""
        reads = [read for read in self.tear_down(peer) if read != posting]
        log.warning("peer lost incarnation=%s reads=%d reason=%s", peer, len(reads), reason)
        self._unreported.extend(ReadOutcome(read, peer, failure=reason) for read in reads)
