"""Reads that are not terminal, and which of them nobody waits for any more."""

from collections.abc import Iterable
from dataclasses import dataclass

from core.errors import InvalidTransitionError
from core.ids import BlockId, Incarnation, OperationId, Owner
from core.messages import PieceId


@dataclass(slots=True, eq=False)
class Operation:
    """One read that was decided, and is not terminal."""

    operation: OperationId
    peer: Incarnation
    owner: Owner
    piece: PieceId
    block_ids: frozenset[BlockId]
    """Here, that it fills; reads of other layers may fill the same."""
    nbytes: int
    begun_at: float | None = None
    """When the first of it was posted; until then it waits its turn, which is nobody's fault."""
    is_quarantined: bool = False
    """Its request ended or was rolled back, or never was: only its end matters now."""


def count_blocks(operations: Iterable[Operation]) -> int:
    """Return how many blocks are filled by one or more of ``operations``."""
    return len(frozenset[BlockId]().union(*(operation.block_ids for operation in operations)))


class Operations:
    """All reads that are not terminal, oldest first."""

    def __init__(self) -> None:
        self._pending: dict[OperationId, Operation] = {}

    def __len__(self) -> int:
        return len(self._pending)

    def begin(self, operation: Operation) -> None:
        """Record a read.

        Raises:
            InvalidTransitionError: its id is in use.
        """
        if operation.operation in self._pending:
            raise InvalidTransitionError(f"operation {operation.operation} is pending already")
        self._pending[operation.operation] = operation

    def get(self, operation: OperationId) -> Operation | None:
        """Return a read that is not terminal."""
        return self._pending.get(operation)

    def end(self, operation: OperationId) -> Operation | None:
        """Forget a read that is terminal and return it; None: it ended before, or never was."""
        return self._pending.pop(operation, None)

    def begun(self, operation: OperationId, now: float) -> None:
        """The first part of a read was posted. One that has ended, or had begun, stays as it is."""
        pending = self._pending.get(operation)
        if pending is not None and pending.begun_at is None:
            pending.begun_at = now

    def quarantine(self, operation: OperationId) -> None:
        """Nobody waits for this read any more."""
        self._pending[operation].is_quarantined = True

    def all(self) -> Iterable[Operation]:
        """Return every read, oldest first."""
        return self._pending.values()
