"""A network that keeps the letter of ``Transport`` and is as hostile as a real one can be.

Writes land descriptor by descriptor, in any order, at any later time, and read the source at that
time: a source block that was freed and reused meanwhile gives the new content. A cancel returns at
once and stops nothing. Only completion, or the end of the endpoint, is an end.
"""

import ctypes
import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from core.errors import ConfigError, PeerLostError, TransferError
from core.ids import Incarnation, ReadId
from core.messages import PoolEndpoint
from transfer.transport import Extent, Extents, MemoryKind, Path, ReadOutcome, rows_of


@dataclass
class Write:
    """One descriptor on its way."""

    read: ReadId
    peer: Incarnation
    to_address: int
    from_address: int
    nbytes: int

    def land(self) -> None:
        ctypes.memmove(self.to_address, self.from_address, self.nbytes)


@dataclass
class Network:
    """Pools by the name that an endpoint carries."""

    pools: dict[bytes, tuple[int, int]] = field(default_factory=dict)


@dataclass
class _Peer:
    endpoint: PoolEndpoint
    is_frozen: bool = False
    is_dead: bool = False


class AdversaryNic:
    """See ``Transport``. ``step`` and the faults below are the adversary's own."""

    name = "adversary"
    wake_descriptor = None

    def __init__(self, network: Network, *, rng: random.Random | None = None) -> None:
        self.network = network
        self.rng = rng or random.Random(0)
        self.peers: dict[Incarnation, _Peer] = {}
        self.writes: list[Write] = []
        self.lost_writes: list[Write] = []
        """Of reads that were torn down: landing one now would break the transport's promise."""
        self.pending: dict[ReadId, tuple[Incarnation, int]] = {}
        self.done: list[ReadOutcome] = []
        self.num_progress_calls = 0
        self.duplicates_outcomes = False
        self._ids = itertools.count(1)
        self._pool: tuple[int, int] | None = None

    # Transport

    def arm(self) -> bool:
        return False

    def register(self, address: int, nbytes: int, *, memory: MemoryKind = "host") -> None:
        assert memory == "host"
        if self._pool is not None or nbytes <= 0:
            raise ConfigError("a pool is registered already, or is empty")
        self._pool = (address, nbytes)

    def endpoint(self) -> PoolEndpoint:
        assert self._pool is not None
        metadata = f"pool-{id(self)}".encode()
        self.network.pools[metadata] = self._pool
        return PoolEndpoint(self.name, metadata, *self._pool)

    def connect(self, peer: Incarnation, endpoint: PoolEndpoint) -> None:
        if endpoint.transport != self.name or endpoint.metadata not in self.network.pools:
            raise TransferError(f"{peer} has no usable endpoint")
        self.peers.setdefault(peer, _Peer(endpoint))

    def is_connected(self, peer: Incarnation) -> bool:
        return peer in self.peers

    def path(self, peer: Incarnation) -> Path:
        if peer not in self.peers:
            raise PeerLostError(f"{peer} is not connected")
        return Path("unknown", self.name)

    def read(self, peer: Incarnation, extents: Extents) -> ReadId:
        target = self.peers.get(peer)
        extents = [Extent(*row) for row in rows_of(extents).tolist()]
        if target is None:
            raise PeerLostError(f"{peer} is not connected")
        self._require_inside(target, extents)
        if target.is_dead:
            self._fail(peer, "connection reset")
            raise PeerLostError(f"{peer}: connection reset")
        assert self._pool is not None
        read = ReadId(next(self._ids))
        self.pending[read] = (peer, len(extents))
        self.writes += [
            Write(
                read,
                peer,
                self._pool[0] + extent.local_offset,
                target.endpoint.base_address + extent.remote_offset,
                extent.nbytes,
            )
            for extent in extents
        ]
        return read

    def poll(self) -> list[ReadOutcome]:
        for peer in [peer for peer, target in self.peers.items() if target.is_dead]:
            self._fail(peer, "connection reset")
        for read, (peer, _) in list(self.pending.items()):
            if not any(write.read == read for write in self.writes):
                del self.pending[read]
                self.done.append(ReadOutcome(read, peer))
        outcomes, self.done = self.done, []
        return outcomes * 2 if self.duplicates_outcomes else outcomes

    def tear_down(self, peer: Incarnation) -> list[ReadId]:
        self.peers.pop(peer, None)
        reads = [read for read, (owner, _) in self.pending.items() if owner == peer]
        for read in reads:
            del self.pending[read]
        self.lost_writes += [write for write in self.writes if write.peer == peer]
        self.writes = [write for write in self.writes if write.peer != peer]
        return reads

    def progress(self) -> None:
        self.num_progress_calls += 1

    def close(self) -> None:
        for peer in list(self.peers):
            self.tear_down(peer)

    # The adversary

    def step(self, count: int = 1) -> None:
        """Land ``count`` random writes of peers that are not frozen."""
        for _ in range(count):
            ready = [write for write in self.writes if not self.peers[write.peer].is_frozen]
            if not ready:
                return
            write = self.rng.choice(ready)
            self.writes.remove(write)
            write.land()

    def finish(self) -> None:
        """Land everything that is not frozen."""
        self.step(len(self.writes))

    def cancel(self, read: ReadId) -> None:
        """What libraries offer: returns at once, and proves nothing."""

    def freeze(self, peer: Incarnation) -> None:
        """The source stops: nothing lands and nothing fails until ``thaw``."""
        self.peers[peer].is_frozen = True

    def thaw(self, peer: Incarnation) -> None:
        """The source goes on."""
        if peer in self.peers:
            self.peers[peer].is_frozen = False

    def kill(self, peer: Incarnation) -> None:
        """The source dies: its reads fail at the next poll."""
        if peer in self.peers:
            self.peers[peer].is_dead = True

    def _fail(self, peer: Incarnation, reason: str) -> None:
        self.done += [ReadOutcome(read, peer, failure=reason) for read in self.tear_down(peer)]

    def _require_inside(self, target: _Peer, extents: Sequence[Extent]) -> None:
        assert self._pool is not None
        for extent in extents:
            is_inside = (
                extent.nbytes > 0
                and 0 <= extent.local_offset <= self._pool[1] - extent.nbytes
                and 0 <= extent.remote_offset <= target.endpoint.nbytes - extent.nbytes
            )
            if not is_inside:
                raise TransferError(f"{extent} is outside of a pool")
        if not extents:
            raise TransferError("a read needs at least one extent")
