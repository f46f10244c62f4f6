"""Memory for KV that prefill workers send: promised as a whole, given ticket by ticket."""

from blockmgr.block_manager import BlockManager
from blockmgr.receive_target import ReceiveTarget
from core.errors import OutOfBlocksError
from core.ids import BlockId, Generation, OperationId, Owner
from decode.kv_budget import KVBudget
from decode.sequence import Sequence
from decode.sequence_table import SequenceTable


class RemoteAdmission:
    """Gives REMOTE sequences of one table their blocks, and remembers whom it had to refuse."""

    def __init__(self, blocks: BlockManager, budget: KVBudget, table: SequenceTable) -> None:
        self._blocks = blocks
        self._budget = budget
        self._table = table
        self._refused: dict[Owner, int] = {}  # by arrival: no memory for a first ticket

    def pin_prefix(self, sequence: Sequence) -> None:
        """Pin the hit if all the rest can be promised; whoever holds blocks never waits.

        Not while an older remote sequence has no promise: prefill works in order, so this one
        would hold memory here while it waits there behind the older one, which waits for memory
        here.
        """
        cached = 0 if self._table.has_unpromised_remote else self._budget.usable_hit(sequence)
        num_tokens = sequence.num_tokens
        need = self._budget.blocks_to_receive(num_tokens, num_cached=cached)
        if cached:
            pinned = self._budget.cost(sequence, num_cached=cached, num_tokens=cached)
            if pinned + need > self._available():
                cached = 0
        self._budget.admit(sequence, num_cached=cached, num_tokens=cached)
        if cached:
            self._budget.promise(sequence, need)

    def receive(
        self, sequence: Sequence, targets: list[ReceiveTarget], operation: OperationId
    ) -> list[list[tuple[BlockId, Generation]]] | None:
        """See ``DecodeScheduler.receive``."""
        owner = sequence.owner
        if sequence.promised_blocks is None:
            need = self._budget.blocks_to_receive(sequence.num_tokens)
            if self._table.is_preempted_one_waiting or need > self._available():
                self._refused[owner] = sequence.arrival
                return None
            self._refused.pop(owner, None)
            self._budget.promise(sequence, need)
        num_new = self._blocks.num_vacant(owner, targets)
        try:
            blocks = self._blocks.begin_receive(owner, targets, operation)
        except OutOfBlocksError:
            return None
        self._budget.promise(sequence, max((sequence.promised_blocks or 0) - num_new, 0))
        return blocks

    def has_refused_before(self, sequence: Sequence) -> bool:
        """Whether one that is older than ``sequence`` waits for memory for its first ticket."""
        return any(arrival < sequence.arrival for arrival in self._refused.values())

    def forget(self, owner: Owner) -> None:
        """``owner`` waits for no ticket's memory any more."""
        self._refused.pop(owner, None)

    def _available(self) -> int:
        return self._budget.available(num_running=self._table.num_running)
