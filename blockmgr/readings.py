"""What can be asked of a block manager. Nothing here changes anything."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from blockmgr.allocator import BlockAllocator
from blockmgr.block_table import HOLE
from blockmgr.fences import OperationLedger, StepLedger
from blockmgr.history import BlockHistory
from blockmgr.holding import Holding
from blockmgr.invariants import expected_words
from blockmgr.pool import BlockObserver, BlockPool
from blockmgr.prefix_tree import PrefixTree
from blockmgr.receive_target import ReceiveTarget
from blockmgr.states import BlockState, Hold
from blockmgr.stats import BlockStats
from blockmgr.token_run import TokenRun
from blockmgr.zero_list import ZeroList
from core.errors import InvalidTransitionError
from core.ids import BlockId, Generation, OperationId, Owner
from core.kv_layout import KVLayout


@dataclass(frozen=True, slots=True)
class BlockWaits:
    """What a block without an owner still waits for."""

    releases: int
    """Releases of it that wait for a step."""
    operations: int
    """NIC and copy operations that name it."""


class BlockReadings:
    """The parts of a block manager, and its questions."""

    def __init__(
        self,
        layout: KVLayout,
        num_blocks: int,
        *,
        fences: bool,
        prefix_caching: bool,
        zero_on_allocate: bool = False,
        observers: Sequence[BlockObserver] = (),
        history: BlockHistory | None = None,
    ) -> None:
        self.stats = BlockStats()
        self._layout = layout
        self._fences = fences
        self._prefix_caching = prefix_caching
        self._has_windows = any(group.window is not None for group in layout.groups)
        self._pool = BlockPool(num_blocks)
        self._tree = PrefixTree(layout.groups, layout.block_size, self._pool)
        self._pool.observers = observers
        self._history = history
        self._zero_list = ZeroList(enabled=zero_on_allocate)
        self._allocator = BlockAllocator(
            self._pool, self._tree, self._zero_list, self.stats, block_size=layout.block_size
        )
        self._steps = StepLedger()
        self._operations = OperationLedger()
        self._holdings: dict[Owner, Holding] = {}
        self._cache_epoch: int = 0

    # Owners

    def count_cached_tokens(self, tokens: TokenRun, max_tokens: int | None = None) -> int:
        """Return the longest usable hit for ``tokens``, a multiple of the block size.

        Changes nothing.

        Args:
            tokens: Of the request.
            max_tokens: Of the hit; a window group may lack a block for a shorter hit that it has
                for a longer one, so a longer one must not be cut.
        """
        size = self._layout.block_size
        most = tokens.num_blocks if max_tokens is None else max_tokens // size
        return self._tree.count_usable_blocks(tokens, most) * size

    def holds(self, owner: Owner) -> bool:
        """Whether ``owner`` was admitted and not released."""
        return owner in self._holdings

    @property
    def owners(self) -> list[Owner]:
        """All owners, leases included, in order of admission."""
        return list(self._holdings)

    def block_tables(self, owner: Owner) -> tuple[NDArray[np.int32], ...]:
        """Return a copy of the tables of ``owner``: per group, ids by absolute index, or -1."""
        return tuple(table.entries.astype(np.int32) for table in self._held(owner).tables)

    def num_tokens_covered(self, owner: Owner) -> int:
        """Tokens of ``owner`` from the first on that have room in every group."""
        return self._held(owner).num_covered_tokens

    def num_vacant(self, owner: Owner, targets: Iterable[ReceiveTarget]) -> int:
        """Blocks that ``begin_receive`` would allocate for ``targets``."""
        tables = self._held(owner).tables
        entries = (tables[target.group].entries_at(target.indices) for target in targets)
        return sum(int((found == HOLE).sum()) for found in entries)

    def is_in_flight(self, owner: Owner) -> bool:
        """Whether a dispatched step may touch the blocks of ``owner``."""
        return bool(self._held(owner).steps_in_flight)

    def count_reclaimable(self, owner: Owner) -> int:
        """Blocks that would become allocatable at once if ``owner`` were released.

        0 while a step that contains it is in flight and fences are on: preempting it then gains
        nothing now.
        """
        holding = self._held(owner)
        if self._fences and holding.steps_in_flight:
            return 0
        block_ids = holding.release_order
        owned = self._pool.holds(Hold.OWNER, block_ids) + self._pool.holds(Hold.LEASE, block_ids)
        waits = self._pool.holds(Hold.STEP, block_ids) + self._pool.holds(Hold.OPERATION, block_ids)
        return int(np.count_nonzero((owned == 1) & (waits == 0)))

    def count_common_blocks(self, owners: Sequence[Owner]) -> int:
        """Leading blocks that all ``owners`` share in every group.

        Read from their tables: reference counts also contain releases that still wait.
        """
        tables = [[table.entries for table in self._held(owner).tables] for owner in owners]
        bound = min((len(entries) for owned in tables for entries in owned), default=0)
        for index in range(bound):
            for entries_of_group in zip(*tables, strict=True):
                ids = {int(entries[index]) for entries in entries_of_group}
                if len(ids) > 1 or HOLE in ids:
                    return index
        return bound

    # Blocks

    def counts(self) -> dict[BlockState, int]:
        """Blocks per state; the sum is the size of the pool."""
        return {state: self._pool.count(state) for state in BlockState}

    @property
    def num_blocks(self) -> int:
        """Size of the pool."""
        return self._pool.num_blocks

    @property
    def num_allocatable(self) -> int:
        """Blocks that can be had now: FREE, or CACHED and so evictable."""
        return self._pool.num_allocatable

    @property
    def num_withheld(self) -> int:
        """Blocks without an owner that something may still touch: FENCED or QUARANTINED."""
        return self._pool.num_withheld

    @property
    def num_deferred(self) -> int:
        """Releases that wait for a step."""
        return self._steps.num_deferred

    @property
    def has_pending(self) -> bool:
        """Whether a step or operation is outstanding whose end can free blocks."""
        return bool(self._pool.num_withheld or self._steps.num_deferred or len(self._operations))

    def state(self, block_id: BlockId) -> BlockState:
        """Return the state of one block."""
        return self._pool.state(block_id)

    def waits_of(self, block_id: BlockId) -> BlockWaits:
        """Return both conditions of a block's reuse, each on its own."""
        ids = np.array([block_id])
        return BlockWaits(
            releases=int(self._pool.holds(Hold.STEP, ids)[0]),
            operations=int(self._pool.holds(Hold.OPERATION, ids)[0]),
        )

    def generation(self, block_id: BlockId) -> Generation:
        """Return how often the block has been allocated."""
        return Generation(int(self._pool.generations(np.array([block_id]))[0]))

    def operation_blocks(self, operation: OperationId) -> list[tuple[BlockId, Generation]]:
        """Return what ``operation`` named when it began; nothing if it is not pending."""
        pending = self._operations.get(operation)
        if pending is None:
            return []
        ids = [BlockId(block_id) for block_id in pending.block_ids.tolist()]
        return list(zip(ids, pending.generations, strict=True))

    def describe(self, block_id: BlockId) -> str:
        """Return what is known of a block, for the report of a stale writer."""
        known = f"block={block_id} generation={self.generation(block_id)}"
        known += f" state={self.state(block_id).name}"
        return known if self._history is None else f"{known} {self._history.describe(block_id)}"

    def check_invariants(self) -> None:
        """Assert that every part is consistent and that holds are exactly what holders hold.

        The work is proportional to the pool: for tests and for an idle worker.
        """
        self._tree.check_invariants()
        self._steps.check_invariants()
        for holding in self._holdings.values():
            for table in holding.tables:
                table.check_invariants()
            covered = holding.num_covered_blocks * self._layout.block_size
            assert covered == holding.num_covered_tokens, f"{holding.owner} covers {covered}"
            assert holding.steps_in_flight == self._steps.naming(holding), "a step is a phantom"
            writes = self._operations.count_writes(holding)
            assert holding.num_writes == writes, f"{holding.owner} waits for {writes} writes"
        deferred = self._steps.deferred()
        pending = [operation for _, operation in self._operations.items()]
        self._pool.check_invariants(
            expected_words(
                self._pool.num_blocks,
                holdings=list(self._holdings.values()),
                deferred=deferred,
                pending=pending,
                cached=self._tree.block_ids,
            )
        )
        for operation in pending:
            now = self._pool.generations(operation.block_ids).tolist()
            assert now == list(operation.generations), "a block in an operation was reallocated"
        self._zero_list.check_invariants(self._pool)

    def _held(self, owner: Owner) -> Holding:
        try:
            return self._holdings[owner]
        except KeyError:
            raise InvalidTransitionError(f"{owner} is not held") from None
