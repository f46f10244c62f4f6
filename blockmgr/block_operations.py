"""Blocks that something beside the device's steps touches: reads that land, and copies."""

from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np

from blockmgr.fences import PendingOperation
from blockmgr.free_queue import BlockIds
from blockmgr.holding import Holding
from blockmgr.readings import BlockReadings
from blockmgr.receive_target import ReceiveTarget, require_vacant
from blockmgr.states import Hold, HoldChange
from core.errors import DoubleReleaseError, InvalidTransitionError
from core.ids import BlockId, Generation, OperationId, Owner

_BEGIN_READ: Final = HoldChange(add=(Hold.OPERATION,))
_BEGIN_WRITE: Final = HoldChange(add=(Hold.OPERATION, Hold.WRITE))
_END_READ: Final = HoldChange(drop=(Hold.OPERATION,))
_END_WRITE: Final = HoldChange(drop=(Hold.OPERATION, Hold.WRITE))


class BlockOperations(BlockReadings):
    """The part of a block manager that knows NIC and copy operations, each by its id."""

    def begin_receive(
        self, owner: Owner, targets: Sequence[ReceiveTarget], operation: OperationId
    ) -> list[list[tuple[BlockId, Generation]]]:
        """Allocate blocks that ``operation`` will write, at ``targets`` in the owner's tables.

        They are RECEIVING, are never on the zero list, and keep their ids and generations until
        ``end_operation``, whatever the owner does.

        Returns:
            Per target, block ids with generations in order of position.

        Raises:
            OutOfBlocksError: nothing was taken.
            InvalidTransitionError: not held or a lease, ``operation`` is pending, or a target is
                empty, has a block already, or lies behind the window.
        """
        holding = self._active(owner)
        self._require_new(operation)
        require_vacant(holding, targets)
        block_ids = self._allocator.receive(sum(target.count for target in targets))
        if self._history is not None:
            self._history.owned(block_ids, owner)
        generations = self._begin(holding, block_ids, operation, writes=True)
        pairs = list(zip(map(BlockId, block_ids.tolist()), generations, strict=True))
        placed: list[list[tuple[BlockId, Generation]]] = []
        at = 0
        for target in targets:
            part = slice(at, at + target.count)
            holding.tables[target.group].put(target.indices, block_ids[part])
            placed.append(pairs[part])
            at += target.count
        self._allocator.note_cover(holding)
        return placed

    def begin_operation(
        self,
        owner: Owner,
        block_ids: Iterable[BlockId],
        operation: OperationId,
        *,
        writes: bool = False,
    ) -> None:
        """``operation`` may read (with ``writes`` also write) these blocks of ``owner``.

        Raises:
            InvalidTransitionError: not held, not the owner's blocks, or ``operation`` is pending.
        """
        holding = self._held(owner)
        self._require_new(operation)
        named = np.array(list(block_ids), dtype=np.int64)
        if len(np.intersect1d(named, holding.release_order)) != len(named):
            raise InvalidTransitionError(f"operation {operation} names blocks not of {owner}")
        self._pool.change(named, _BEGIN_WRITE if writes else _BEGIN_READ)
        self._begin(holding, named, operation, writes=writes)
        if writes:
            self._zero_list.remove(named)

    def end_operation(self, operation: OperationId) -> None:
        """``operation`` is terminal, whatever its outcome: it will touch no block any more.

        Raises:
            DoubleReleaseError: it is not pending. Counted; nothing else was changed.
        """
        try:
            pending = self._operations.end(operation)
        except DoubleReleaseError:
            self.stats.double_releases += 1
            raise
        self._pool.change(pending.block_ids[::-1], _END_WRITE if pending.writes else _END_READ)

    # Parts of the above

    def _active(self, owner: Owner) -> Holding:
        holding = self._held(owner)
        if holding.is_lease:
            raise InvalidTransitionError(f"{owner} is a lease")
        return holding

    def _require_new(self, operation: OperationId) -> None:
        if self._operations.get(operation) is not None:
            raise InvalidTransitionError(f"operation {operation} is pending already")

    def _begin(
        self, holding: Holding, block_ids: BlockIds, operation: OperationId, *, writes: bool
    ) -> tuple[Generation, ...]:
        """Register ``operation`` on blocks that have its holds, and return their generations."""
        generations = tuple(map(Generation, self._pool.generations(block_ids).tolist()))
        pending = PendingOperation(holding, block_ids, generations, writes=writes)
        self._operations.begin(operation, pending)
        if writes:
            holding.num_tokens_of_next_change = 0  # settling looks at what has landed
        if self._history is not None:
            self._history.touched(block_ids, operation)
        return generations
