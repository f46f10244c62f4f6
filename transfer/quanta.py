"""What is posted as one read of the transport, within which limits, and how an operation ends."""

from dataclasses import dataclass
from typing import TypeAlias

from core.ids import Incarnation, OperationId
from transfer.transport import ExtentRows

ReadPart: TypeAlias = tuple[Incarnation, ExtentRows]
"""A peer, and what to read of it."""


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """How much is in flight, and how finely requests take turns."""

    quantum_nbytes: int
    """Of one request's turn: no extent is longer, and no quantum has twice that while others wait
    for their turns."""
    max_peer_nbytes: int
    max_total_nbytes: int
    """In flight, above which nothing is posted; but each peer always has one quantum, so that no
    peer waits for one that does not answer."""
    lone_quantum_nbytes: int = 0
    """Of a turn while nobody else has something to post, as far as that is more and the bounds
    above leave room for it: each quantum costs its reader some time beside its bytes."""


@dataclass(frozen=True, slots=True)
class Quantum:
    """What is posted as one read of the transport."""

    number: int
    peer: Incarnation
    operations: tuple[OperationId, ...]
    """That it carries bytes of; all of one owner."""
    extents: ExtentRows
    nbytes: int


@dataclass(frozen=True, slots=True)
class EndedRead:
    """An operation is terminal: nothing of it is in flight, and nothing will be posted."""

    operation: OperationId
    peer: Incarnation
    queued_at: float
    nbytes: int
    """That have landed or may have."""
    num_descriptors: int
    failure: str | None
    """None: every byte has landed, or the read was cancelled."""
    is_cancelled: bool
    """Some of it was never posted, and none of it failed."""
    is_damaged: bool = False
    """All of it has landed, and is not what the source has. A failure says so, too."""
