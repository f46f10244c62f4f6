"""Brings blocks back from the tiers into a pool, for schedulers; takes the answers of the copies.

A block comes back in two moves. From storage to host memory on a request's arrival, which holds
no block of the pool however long it takes; and from host memory into the pool at its admission,
which is a copy within the machine, into blocks that the request owns already.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from blockmgr.block_manager import BlockManager
from blockmgr.host_tier import HostEntry
from blockmgr.receive_target import ReceiveTarget
from blockmgr.tier_book import TierBook
from blockmgr.tier_hits import blocks_to_load, usable_blocks
from blockmgr.token_run import TokenRun
from core.errors import OutOfBlocksError
from core.ids import OperationId, Owner
from core.kv_layout import KVLayout
from core.tiers import BlockName, Tier, TierAction


@dataclass(frozen=True, slots=True)
class EndedLoad:
    """Nothing writes into the owner's blocks any more."""

    owner: Owner
    operation: OperationId
    """Tells the lives of one owner apart: it may have been released and admitted again."""
    num_cached_tokens: int
    """Where the pool's hit ended."""
    num_tokens: int
    """Where the KV of the owner ends, if it did not fail."""
    failed: bool


@dataclass(frozen=True, slots=True)
class _PendingLoad:
    """A copy may be writing into the owner's blocks, or those that were the owner's."""

    owner: Owner
    num_cached_tokens: int
    num_tokens: int

    def end(self, operation: OperationId, *, failed: bool) -> EndedLoad:
        return EndedLoad(self.owner, operation, self.num_cached_tokens, self.num_tokens, failed)


@dataclass(frozen=True, slots=True)
class LoadedAdmission:
    """What an owner is admitted with: the pool's hit, how far a load goes on, and the rest."""

    tokens: TokenRun
    num_cached_tokens: int
    num_loaded_tokens: int
    num_tokens: int


class Tiers:
    """One worker's tiers, joined to its pool."""

    def __init__(self, blocks: BlockManager, layout: KVLayout, book: TierBook) -> None:
        self.book = book
        self._blocks = blocks
        self._layout = layout
        self._loads: dict[OperationId, _PendingLoad] = {}
        self._ended: list[EndedLoad] = []
        self._full_group = next(
            (at for at, group in enumerate(layout.groups) if group.window is None), None
        )

    @property
    def num_host_slots(self) -> int:
        """Blocks that host memory must have room for."""
        return self.book.host.num_slots

    # For schedulers

    def fetch(self, owner: Owner, tokens: TokenRun, max_tokens: int) -> None:
        """Begin to look in storage for what neither pool nor host memory has of ``tokens``.

        A model without a full-attention group is not looked for: storage then has only the
        windows that some earlier request ended with, at lengths that nobody knows.
        """
        last = max_tokens // self._layout.block_size
        cached = self._blocks.count_cached_tokens(tokens, max_tokens)
        first = self.count_tokens(tokens, cached, max_tokens) // self._layout.block_size
        if self.book.storage is None or self._full_group is None or first >= last:
            return
        digests = tokens.digests(last)
        chain = [self.book.name(self._full_group, digest) for digest in digests[first:]]
        self.book.fetch(
            owner,
            chain,
            lambda count: self._names_for_hit(digests, first, first + count),
        )

    def is_fetching(self, owner: Owner) -> bool:
        """Whether what ``owner`` wants is on its way from storage: admit it later. Bounded."""
        return self.book.is_fetching(owner)

    def forget(self, owner: Owner) -> None:
        """``owner`` is gone, or does not wait any more."""
        self.book.forget_owner(owner)

    def count_tokens(self, tokens: TokenRun, num_cached_tokens: int, max_tokens: int) -> int:
        """Return how far the pool's hit of ``num_cached_tokens`` goes on in host memory.

        At least ``num_cached_tokens``. Changes nothing.
        """
        size = self._layout.block_size
        first, last = num_cached_tokens // size, max_tokens // size
        if first >= last or not len(self.book.host):
            return num_cached_tokens
        digests = tokens.digests(last)

        def has(group: int, index: int) -> bool:
            return self.book.host.has(self.book.name(group, digests[index]))

        return usable_blocks(self._layout, first, last, has) * size

    def admit(self, owner: Owner, admission: LoadedAdmission) -> OperationId:
        """Admit ``owner`` and begin to load what follows the pool's hit; return the operation.

        Until the load has ended, nothing of ``owner`` may be computed. It may be released at any
        time; the blocks then wait for the operation.

        Raises:
            OutOfBlocksError: nothing was taken.
        """
        cached, end = admission.num_cached_tokens, admission.num_loaded_tokens
        cost = self._blocks.admission_cost(
            owner,
            tokens=admission.tokens,
            num_cached_tokens=cached,
            num_tokens=admission.num_tokens,
        )
        if cost > self._blocks.num_allocatable:
            raise OutOfBlocksError(
                requested=cost,
                free=self._blocks.num_allocatable,
                withheld=self._blocks.num_withheld,
            )
        self._blocks.admit(
            owner, tokens=admission.tokens, num_cached_tokens=cached, num_tokens=cached
        )
        operation = self._begin_load(owner, admission)
        self._blocks.grow(owner, admission.num_tokens)
        self._loads[operation] = _PendingLoad(owner, cached, end)
        return operation

    def take_ended_loads(self) -> list[EndedLoad]:
        """Return the loads that ended since the last call, those of owners that are gone too."""
        ended, self._ended = self._ended, []
        return ended

    # For whoever moves bytes

    def take_actions(self) -> list[TierAction]:
        """Return what must be carried out, in order, once."""
        return self.book.actions.take()

    def began(self, epoch: str) -> None:
        """The storage is there, and was reset last to ``epoch``; "" is never."""
        self.book.begin_epoch(epoch)

    def marked(self, epoch: str, *, failed: bool) -> None:
        """Later workers begin with ``epoch``; or, ``failed``, may not."""
        self.book.marked(epoch, failed=failed)

    def copied_out(self, operation: OperationId, *, failed: bool) -> None:
        """A ``CopyOut`` is over: it reads no block any more."""
        if self.book.end_store(operation, failed=failed):
            self._blocks.end_operation(operation)

    def copied_in(self, operation: OperationId, *, failed: bool) -> None:
        """A ``CopyIn`` is over: it writes no block any more."""
        entries = self.book.end_load(operation, failed=failed)
        if entries is None:
            return
        self._blocks.end_operation(operation)
        load = self._loads.pop(operation)
        self._ended.append(load.end(operation, failed=failed))
        if not failed:
            self._count_hit(entries, load.num_tokens - load.num_cached_tokens)

    def written(self, operation: OperationId, written: Sequence[bool]) -> None:
        """A ``Write`` is over: it reads no slot any more."""
        if self.book.storage is not None:
            self.book.storage.end_write(operation, written)

    def found(self, operation: OperationId, count: int) -> None:
        """A ``Find`` is over."""
        if self.book.storage is not None:
            self.book.storage.found(operation, count)

    def read(self, operation: OperationId, landed: Sequence[bool]) -> None:
        """A ``Read`` is over: it writes no slot any more."""
        if self.book.storage is not None:
            self.book.storage.end_read(operation, landed)

    # Parts of the above

    def _begin_load(self, owner: Owner, admission: LoadedAdmission) -> OperationId:
        size = self._layout.block_size
        first, end = admission.num_cached_tokens // size, admission.num_loaded_tokens // size
        digests = admission.tokens.digests(end)
        runs = list(blocks_to_load(self._layout, first, end))
        operation = self.book.actions.new_operation()
        placed = self._blocks.begin_receive(
            owner, [ReceiveTarget(group, run.start, len(run)) for group, run in runs], operation
        )
        names = [self.book.name(group, digests[index]) for group, run in runs for index in run]
        self.book.load(operation, names, [block_id for run in placed for block_id, _ in run])
        return operation

    def _names_for_hit(self, digests: Sequence[bytes], first: int, end: int) -> list[BlockName]:
        """Return what a hit of ``end`` blocks needs behind ``first``, in order of position."""
        wanted = [
            (index, group)
            for group, run in blocks_to_load(self._layout, first, end)
            for index in run
        ]
        return [self.book.name(group, digests[index]) for index, group in sorted(wanted)]

    def _count_hit(self, entries: Sequence[HostEntry], num_tokens: int) -> None:
        """Count loaded tokens by the tier that had them, in proportion to the blocks."""
        num_stored = sum(entry.is_from_storage for entry in entries)
        from_storage = num_tokens * num_stored // len(entries)
        self.book.stats.hit_tokens[Tier.STORAGE] += from_storage
        self.book.stats.hit_tokens[Tier.HOST] += num_tokens - from_storage
        for entry in entries:
            entry.is_from_storage = False
