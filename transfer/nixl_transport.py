"""``Transport`` over NIXL's UCX backend: RDMA, shared memory or TCP, whichever UCX finds.

One agent serves the local pool for as long as the process lives, and **each peer that is read from
has an agent of its own**. NIXL's release and disconnect return while a read goes on writing; only
the end of its UCX worker stops it, and an agent owns one worker. Reads of other peers go on.

Measured with NIXL 1.5.1 (UCX 1.23), the source frozen in mid-read, the reader torn down, the
source woken: no byte lands afterwards, over shared memory and over TCP. A source that serves over
RDMA or shared memory takes no part in a read and survives any end of its readers. Over **TCP** UCX
emulates reads with messages, and the source aborts ("unexpected error: Endpoint timeout") when it
meets a read request of a reader that is gone. No setting was found that prevents it (error handling
none or peer, rendezvous on or off). Its worker is then restarted, and the requests that it held are
retried. ``docs/decisions/0012-which-ucx-binding.md`` has the figures.
"""

import itertools
import logging
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from core.errors import ConfigError, InternalError, PeerLostError, TransferError
from core.ids import Incarnation, ReadId
from core.messages import PoolEndpoint
from transfer.descriptors import Pool, describe
from transfer.nixl_bindings import Agent, Bindings, load_bindings, status_name
from transfer.pool_checks import require_new_pool, require_same_transport
from transfer.transport import Extents, MemoryKind, Path, ReadOutcome

log = logging.getLogger(__name__)

_UCX_OPTIONS: Final[Mapping[str, str]] = {}


@dataclass(slots=True)
class _Peer:
    """Everything of one peer. ``agent`` has no other owner: dropping it ends all its reads."""

    agent: Agent
    agent_name: str
    pool: Pool
    handles: dict[ReadId, int] = field(default_factory=dict[ReadId, int])


class NixlTransport:
    """See ``Transport``. Destination of every read is the registered pool itself."""

    def __init__(
        self, incarnation: Incarnation, *, ucx_options: Mapping[str, str] = _UCX_OPTIONS
    ) -> None:
        """Load NIXL.

        Args:
            incarnation: Of this process; names its agents.
            ucx_options: UCX settings of this instance without their ``UCX_`` prefix, such as
                ``{"TLS": "tcp"}``. An environment variable of the same name wins.

        Raises:
            ConfigError: NIXL cannot be loaded.
        """
        self._bindings: Bindings = load_bindings()
        self._incarnation = incarnation
        self._parameters = (
            {"engine_config": ",".join(f"{key}={value}" for key, value in ucx_options.items())}
            if ucx_options
            else {}
        )
        self._pool: Pool | None = None
        self._server: Agent | None = None
        self._peers: dict[Incarnation, _Peer] = {}
        self._read_ids = itertools.count(1)
        self._agent_numbers = itertools.count(1)
        self._unreported: list[ReadOutcome] = []

    @property
    def name(self) -> str:
        """See ``Transport.name``."""
        return "nixl"

    @property
    def wake_descriptor(self) -> None:
        """NIXL has nothing to wait on: its UCX workers are its own."""

    def arm(self) -> bool:
        """See ``Transport.arm``."""
        return False

    def register(self, address: int, nbytes: int, *, memory: MemoryKind = "host") -> None:
        """See ``Transport.register``."""
        require_new_pool(self.name, self._pool, address, nbytes)
        pool = Pool(address, nbytes, memory)
        self._server = self._open_agent(self._incarnation, pool)
        self._pool = pool

    def endpoint(self) -> PoolEndpoint:
        """See ``Transport.endpoint``."""
        pool, server = self._registered()
        return PoolEndpoint(
            transport=self.name,
            metadata=server.getLocalMD(),
            base_address=pool.address,
            nbytes=pool.nbytes,
        )

    def connect(self, peer: Incarnation, endpoint: PoolEndpoint) -> None:
        """See ``Transport.connect``."""
        if peer in self._peers:
            return
        require_same_transport(self.name, peer, endpoint)
        pool, _ = self._registered()
        try:
            agent = self._open_agent(f"{self._incarnation}-{next(self._agent_numbers)}", pool)
            agent_name = agent.loadRemoteMD(endpoint.metadata).decode()
        except (ConfigError, *self._bindings.errors) as error:
            raise TransferError(f"peer {peer}: its endpoint cannot be used: {error}") from error
        self._peers[peer] = _Peer(agent, agent_name, Pool(endpoint.base_address, endpoint.nbytes))

    def is_connected(self, peer: Incarnation) -> bool:
        """See ``Transport.is_connected``."""
        return peer in self._peers

    def path(self, peer: Incarnation) -> Path:
        """See ``Transport.path``. NIXL does not say what its UCX has chosen."""
        if peer not in self._peers:
            raise PeerLostError(f"peer {peer} is not connected")
        return Path("unknown", "nixl")

    def read(self, peer: Incarnation, extents: Extents) -> ReadId:
        """See ``Transport.read``."""
        target = self._peers.get(peer)
        if target is None:
            raise PeerLostError(f"peer {peer} is not connected")
        pool, _ = self._registered()
        bindings = self._bindings
        wanted = describe(extents, pool, target.pool)
        read = ReadId(next(self._read_ids))
        try:
            handle = target.agent.createXferReq(
                bindings.read,
                bindings.descriptors(_rows(wanted.local, wanted.nbytes), pool.memory),
                bindings.descriptors(_rows(wanted.remote, wanted.nbytes), pool.memory),
                target.agent_name,
                "",
            )
            status = target.agent.postXferReq(handle, "")
        except bindings.errors as error:
            # Part of the descriptors may be posted: only the end of the worker proves otherwise.
            reason = f"post failed: {error}"
            del target
            self._fail_peer(peer, reason)
            raise PeerLostError(f"peer {peer}: {reason}") from error
        if status == bindings.success:
            target.agent.releaseXferReq(handle)
            self._unreported.append(ReadOutcome(read, peer))
        else:
            target.handles[read] = handle
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
        reads = list(target.handles)
        _destroy(target)
        return reads

    def progress(self) -> None:
        """See ``Transport.progress``."""
        _, server = self._registered()
        server.getNotifs({})

    def close(self) -> None:
        """See ``Transport.close``."""
        for peer in list(self._peers):
            self.tear_down(peer)
        self._unreported.clear()
        self._server = None
        self._pool = None

    def _registered(self) -> tuple[Pool, Agent]:
        if self._pool is None or self._server is None:
            raise InternalError("transport nixl is used before register, or after close")
        return self._pool, self._server

    def _open_agent(self, name: str, pool: Pool) -> Agent:
        try:
            agent = self._bindings.agent(name)
            agent.createBackend("UCX", self._parameters)
            agent.registerMem(self._bindings.registration(pool.address, pool.nbytes, pool.memory))
        except self._bindings.errors as error:
            raise ConfigError(
                f"transport nixl: a pool of {pool.nbytes} bytes cannot be registered with UCX "
                f"({error}); check UCX_TLS, and the memlock limit where RDMA is used"
            ) from error
        return agent

    def _poll_peer(self, peer: Incarnation) -> str | None:
        """Record the peer's completed reads; return why one failed, or None."""
        target = self._peers[peer]
        bindings = self._bindings
        for read, handle in list(target.handles.items()):
            try:
                status = target.agent.getXferStatus(handle)
            except bindings.errors as error:
                return str(error)
            if status == bindings.in_progress:
                continue
            if status != bindings.success:
                return status_name(status)
            del target.handles[read]
            target.agent.releaseXferReq(handle)
            self._unreported.append(ReadOutcome(read, peer))
        return None

    def _fail_peer(self, peer: Incarnation, reason: str) -> None:
        reads = self.tear_down(peer)
        log.warning("peer lost incarnation=%s reads=%d reason=%s", peer, len(reads), reason)
        self._unreported.extend(ReadOutcome(read, peer, failure=reason) for read in reads)


def _rows(addresses: NDArray[np.uint64], sizes: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return [n, 3] of address, bytes, device: NIXL's form of descriptors."""
    return np.stack([addresses, sizes, np.zeros_like(sizes)], axis=1)


def _destroy(peer: _Peer) -> None:
    """Destroy the peer's agent, and with it the UCX worker that its reads live in.

    The handles of reads in progress are not released: that would only ask UCX to cancel, and
    lose track of them. They go with the worker.
    """
    alive = weakref.ref(peer.agent)
    del peer.agent
    if alive() is not None:
        raise InternalError(f"agent of peer {peer.agent_name} is still referenced after tear-down")
