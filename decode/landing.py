"""Where received KV goes: memory for it when its turn comes, and trust when all of it is there."""

from dataclasses import dataclass

from blockmgr.block_manager import BlockManager
from blockmgr.receive_target import ReceiveTarget
from core.ids import OperationId, Owner
from core.messages import GroupBlocks, Ticket
from decode.scheduler import DecodeScheduler
from decode.tracing import DecodeTrace
from transfer.actions import Deliver
from transfer.integrity import Digests, DigestsOf
from transfer.positions import Positions


@dataclass(frozen=True, slots=True)
class Memory:
    """Where received KV goes: the scheduler decides when, the block manager where."""

    blocks: BlockManager
    scheduler: DecodeScheduler
    digests_of: DigestsOf
    """Of what is in the pool now."""


class Landing:
    """Finds blocks for tickets, oldest request first, and vouches for what has landed in them."""

    def __init__(self, memory: Memory, trace: DecodeTrace) -> None:
        self._blocks = memory.blocks
        self._scheduler = memory.scheduler
        self._digests_of = memory.digests_of
        self._trace = trace

    def may_place(self, owner: Owner, *, is_full: bool) -> bool:
        """Whether ``owner`` may get memory now, where ``is_full``: an older request found none.

        No newcomer passes an older request that waits; what was promised is there in any case.
        """
        sequence = self._scheduler.get(owner)
        return sequence is not None and not (is_full and sequence.promised_blocks is None)

    def place(
        self, owner: Owner, ticket: Ticket, positions: tuple[Positions, ...], operation: OperationId
    ) -> list[GroupBlocks] | None:
        """Return blocks at ``positions`` for ``operation`` to fill; None: there is none now."""
        targets = [ReceiveTarget(run.group, run.first_index, run.count) for run in positions]
        placed = self._scheduler.receive(owner, targets, operation)
        if placed is None:
            return None
        self._trace.allocated(owner, ticket, operation)
        return [
            GroupBlocks(
                group=target.group,
                first_index=target.first_index,
                block_ids=tuple(block_id for block_id, _ in blocks),
                generations=tuple(generation for _, generation in blocks),
            )
            for target, blocks in zip(targets, placed, strict=True)
        ]

    def end(self, operation: OperationId) -> None:
        """Nothing of ``operation`` writes into its blocks any more."""
        self._blocks.end_operation(operation)

    def is_intact(self, expected: Digests | None) -> bool:
        """Whether what has landed is what was sent, as far as the source tells."""
        return expected is None or expected.match(self._digests_of)

    def fault_of(self, delivery: Deliver) -> str | None:
        """Return why bytes cannot be trusted; None: each block is in the life of its read still."""
        for named in delivery.blocks:
            now = tuple(map(self._blocks.generation, named.block_ids))
            if now != named.generations:
                return f"blocks {named.block_ids} changed hands: {named.generations} to {now}"
        return None
