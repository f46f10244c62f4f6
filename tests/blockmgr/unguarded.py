"""Block managers with one guard each switched off: what a test of races must notice."""

import contextlib
from collections.abc import Iterable, Sequence

import numpy as np

from blockmgr.block_manager import BlockManager
from blockmgr.free_queue import BlockIds
from blockmgr.holding import Holding
from blockmgr.receive_target import ReceiveTarget
from core.errors import DoubleReleaseError
from core.ids import BlockId, Generation, OperationId, Owner, StepSeq


class WithoutStepFence(BlockManager):
    """Released blocks are reused while a step is in flight."""

    def _let_go(self, holding: Holding, block_ids: BlockIds) -> None:
        self._fences = False
        super()._let_go(holding, block_ids)


class FenceByFirstStep(BlockManager):
    """The first completed step of a request counts for all of its steps."""

    def _let_go(self, holding: Holding, block_ids: BlockIds) -> None:
        steps, holding.steps_in_flight = holding.steps_in_flight, holding.steps_in_flight[:1]
        super()._let_go(holding, block_ids)
        holding.steps_in_flight = steps


class CancelIsTerminal(BlockManager):
    """A released owner's reads count as over."""

    def release(self, owner: Owner) -> None:
        for operation, pending in self._operations.items():
            if pending.holding.owner == owner:
                super().end_operation(operation)
        super().release(owner)

    def end_operation(self, operation: OperationId) -> None:
        if self._operations.get(operation) is not None:
            super().end_operation(operation)


class ClearsReceived(BlockManager):
    """Blocks that a read fills are cleared like all others."""

    def begin_receive(
        self, owner: Owner, targets: Sequence[ReceiveTarget], operation: OperationId
    ) -> list[list[tuple[BlockId, Generation]]]:
        placed = super().begin_receive(owner, targets, operation)
        for part in placed:
            received = np.array([at for at, _ in part], dtype=np.int32)
            self._zero_list.add(received, self._holdings[owner])
        return placed

    def check_invariants(self) -> None:
        """Leave it to the bytes to show the damage."""


class PrunesTooFar(BlockManager):
    """Tokens in flight count as settled where the window is pruned."""

    def settle(self, owner: Owner, num_tokens: int) -> None:
        super().settle(owner, num_tokens)
        holding = self._held(owner)
        for table in holding.tables:
            pruned = table.prune(num_tokens + 2)
            if len(pruned):
                self._let_go(holding, pruned)


class SharesUnsettled(BlockManager):
    """Blocks can be hit before the step that writes them has completed."""

    def dispatch_step(self, owners: Iterable[Owner]) -> StepSeq:
        owners = list(owners)
        for owner in owners:
            holding = self._held(owner)
            known = 0 if holding.tokens is None else holding.tokens.num_blocks
            self._allocator.offer(holding, min(known, holding.num_covered_blocks))
        return super().dispatch_step(owners)


class FirstEndIsTerminal(BlockManager):
    """A block that two reads fill is free of both when one has ended."""

    def _join_receive(self, holding: Holding, block_ids: BlockIds, *, num_new: int) -> None:
        """Count no second read."""

    def end_operation(self, operation: OperationId) -> None:
        with contextlib.suppress(DoubleReleaseError):
            super().end_operation(operation)

    def check_invariants(self) -> None:
        """Leave it to the states and bytes to show the damage."""
