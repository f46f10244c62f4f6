"""What the transfer needs from a network: one-sided reads whose end can be proven."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from core.ids import Incarnation, ReadId
from core.messages import PoolEndpoint

MemoryKind = Literal["host", "cuda"]
"""Where a pool lies."""

PathKind = Literal["shared_memory", "rdma", "tcp", "cuda_ipc", "unknown"]


@dataclass(frozen=True, slots=True)
class Path:
    """How the bytes of a peer's reads travel, for metrics and for the operator."""

    kind: PathKind
    description: str
    """In the library's own words, such as ``cma/memory`` or ``tcp/eth0``."""


class Extent(NamedTuple):
    """Adjacent bytes that one descriptor moves. Offsets count from the start of each pool."""

    local_offset: int
    remote_offset: int
    nbytes: int


ExtentRows: TypeAlias = NDArray[np.int64]
"""[n, 3]: a row per extent, its columns in the order of ``Extent``'s fields."""
Extents: TypeAlias = ExtentRows | Sequence[Extent]
"""A request has hundreds: as rows they cost nothing to carry, as objects a microsecond each."""


FEW_ROWS: Final = 64
"""Up to so many, a loop is faster than arrays are: each call of numpy takes 1 to 5 us."""


def rows_of(extents: Extents) -> ExtentRows:
    """Return ``extents`` as rows; those that are rows already are not copied."""
    return np.asarray(extents, dtype=np.int64).reshape(-1, 3)


@dataclass(frozen=True, slots=True)
class ReadOutcome:
    """A read is terminal: none of its bytes will be written any more."""

    read: ReadId
    peer: Incarnation
    failure: str | None = None
    """Why it failed; None: every byte has landed."""

    @property
    def is_complete(self) -> bool:
        """Whether every byte of the read is in the local pool."""
        return self.failure is None


class Transport(Protocol):
    """Reads from peers' pools straight into the local one.

    Not thread-safe: one event loop owns each instance. Nothing runs behind the caller's back, so
    both sides must call: ``poll`` while own reads are outstanding, ``progress`` while a peer reads.
    """

    @property
    def name(self) -> str:
        """Value of ``PoolEndpoint.transport``, and label of metrics."""
        ...

    @property
    def wake_descriptor(self) -> int | None:
        """A descriptor to wait on: readable once something has come after ``arm`` returned True.

        One for all peers and both directions, the same from ``register`` to ``close``. None: the
        library has nothing to wait on, so ``poll`` and ``progress`` must be called again and again.
        """
        ...

    def arm(self) -> bool:
        """Make ``wake_descriptor`` tell what comes from now on. Before each wait, after ``poll``.

        Returns:
            False: something has come already, or there is nothing to wait on; call ``poll`` and
            ``progress`` instead of waiting.
        """
        ...

    def register(self, address: int, nbytes: int, *, memory: MemoryKind = "host") -> None:
        """Make ``[address, address + nbytes)`` the local pool. Once, before all else.

        Raises:
            ConfigError: the memory cannot be registered, or a pool already is. Fatal: without a
                registered pool no read can be right.
        """
        ...

    def endpoint(self) -> PoolEndpoint:
        """Return what a peer needs to read the local pool. It stays good until ``close``."""
        ...

    def connect(self, peer: Incarnation, endpoint: PoolEndpoint) -> None:
        """Prepare reads from ``peer``. A peer that is already connected is left as it is.

        Raises:
            TransferError: the endpoint is of another transport, or cannot be used.
        """
        ...

    def is_connected(self, peer: Incarnation) -> bool:
        """Whether ``read`` takes ``peer``: connected, and not torn down since."""
        ...

    def path(self, peer: Incarnation) -> Path:
        """Return how reads of ``peer`` travel; its kind is ``unknown`` where nothing tells.

        Raises:
            PeerLostError: ``peer`` is not connected.
        """
        ...

    def read(self, peer: Incarnation, extents: Extents) -> ReadId:
        """Post one read of all ``extents`` and return its id. It ends in exactly one outcome.

        Raises:
            PeerLostError: ``peer`` is not connected, or the post failed. The read is terminal: none
                of its bytes will be written. Outcomes of the peer's other reads follow in ``poll``.
            TransferError: an extent is outside of a pool. Nothing was posted.
        """
        ...

    def poll(self) -> list[ReadOutcome]:
        """Make progress, and return the reads that became terminal since the last call.

        A failed read fails its peer: the endpoint is torn down before any outcome says so, since an
        error status alone does not prove that no other descriptor of it lands later.
        """
        ...

    def tear_down(self, peer: Incarnation) -> list[ReadId]:
        """End every read of ``peer`` and return their ids; ``poll`` does not report them again.

        On return nothing of them is written any more. The peer may be connected anew.
        """
        ...

    def progress(self) -> None:
        """Serve readers of the local pool: called while one of them says that it reads."""
        ...

    def close(self) -> None:
        """Tear down every peer and the local pool's registration. Nothing is written afterwards."""
        ...
