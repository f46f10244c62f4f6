"""Blocks that something beside the device's steps touches: reads that land, and copies."""

from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np

from blockmgr.block_table import HOLE
from blockmgr.fences import PendingOperation
from blockmgr.free_queue import BlockIds
from blockmgr.holding import Holding
from blockmgr.readings import BlockReadings
from blockmgr.receive_target import ReceiveTarget, entries_to_fill
from blockmgr.states import Hold, HoldChange
from core.errors import DoubleReleaseError, InvalidTransitionError
from core.ids import BlockId, Generation, OperationId, Owner

_BEGIN_READ: Final = HoldChange(add=(Hold.OPERATION,))
_BEGIN_WRITE: Final = HoldChange(add=(Hold.OPERATION, Hold.WRITE))
_END_READ: Final = HoldChange(drop=(Hold.OPERATION,))
_END_WRITE: Final = HoldChange(drop=(Hold.OPERATION, Hold.WRITE))
_NO_BLOCKS: Final = np.empty(0, dtype=np.int64)


class BlockOperations(BlockReadings):
    """The part of a block manager that knows NIC and copy operations, each by its id."""

    def begin_receive(
        self, owner: Owner, targets: Sequence[ReceiveTarget], operation: OperationId
    ) -> list[list[tuple[BlockId, Generation]]]:
        """Let ``operation`` write blocks at ``targets`` in the owner's tables: new where none is.

        They are RECEIVING, are never on the zero list, and keep their ids and generations until
        every operation that names them has ended, whatever the owner does. A block that another
        operation of this owner has begun to fill takes this one, too, as long as nobody else and
        no step has been given it: the layers and ranks of one position come separately.

        Returns:
            Per target, block ids with generations in order of position.

        Raises:
            OutOfBlocksError: nothing was taken.
            InvalidTransitionError: not held or a lease, ``operation`` is pending, or a target is
                empty, overlaps another, lies behind the window, or has a block that is not being
                received for this owner alone.
        """
        holding = self._active(owner)
        self._require_new(operation)
        entries = entries_to_fill(holding, targets, block_size=self._layout.block_size)
        every = np.concatenate((*entries, _NO_BLOCKS))
        is_new = every == HOLE
        self._join_receive(holding, every[~is_new], num_new=int(is_new.sum()))
        every[is_new] = self._allocator.receive(int(is_new.sum()))
        if self._history is not None:
            self._history.owned(every[is_new], owner)
        generations = self._begin(holding, every, operation, writes=True)
        pairs = list(zip(map(BlockId, every.tolist()), generations, strict=True))
        placed: list[list[tuple[BlockId, Generation]]] = []
        at = 0
        for target in targets:
            part = slice(at, at + target.count)
            holding.tables[target.group].put_new(target.first_index, every[part], is_new[part])
            placed.append(pairs[part])
            at += target.count
        holding.received.update(every.tolist())
        self._allocator.note_cover(holding)
        return placed

    def _join_receive(self, holding: Holding, block_ids: BlockIds, *, num_new: int) -> None:
        """Let one more operation write ``block_ids``, if ``num_new`` others can be allocated, too.

        Raises:
            OutOfBlocksError: they cannot.
            InvalidTransitionError: somebody else has one of the blocks.
        """
        if not len(block_ids):
            return
        if not self._pool.are_unshared(block_ids):
            raise InvalidTransitionError(f"{holding.owner} does not receive its blocks alone")
        self._allocator.require(num_new)
        self._pool.change(block_ids, _BEGIN_WRITE)

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
