"""A pool with tiers in which every block and slot holds a name instead of bytes.

The test decides when a copy, a look-up or a write happens, and how it ends. A copy moves what is
there when it ends: the latest moment that is allowed, so what was reused too early shows.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from blockmgr.states import BlockState
from blockmgr.storing_blocks import StoringBlocks
from blockmgr.tier_book import TierBook, TierBounds
from blockmgr.tiers import EndedLoad, LoadedAdmission, Tiers
from blockmgr.token_run import TokenRun
from blockmgr.window import needed_blocks
from core.ids import Incarnation, OperationId, Owner
from core.kv_layout import KVGroup
from core.tiers import (
    BlockName,
    CopyIn,
    CopyOut,
    Find,
    MarkEpoch,
    Read,
    TierAction,
    Write,
)
from tests.blockmgr.words import layout_of, owner_of, run_of

SIZE = 4


@dataclass(frozen=True)
class Content:
    """What a block or slot holds: which name, computed since which reset."""

    name: BlockName
    era: int


GARBAGE = Content(BlockName(-1, b"never written"), -1)


class TierWorld:
    def __init__(
        self,
        num_blocks: int,
        *groups: KVGroup,
        num_slots: int = 64,
        max_copied: int = 64,
        max_staged: int = 0,
        fences: bool = True,
        zero_on_allocate: bool = False,
    ) -> None:
        self.layout = layout_of(*groups, block_size=SIZE)
        self.bounds = TierBounds(num_slots, max_copied, max_staged)
        self.book = TierBook(self.bounds, incarnation=Incarnation("life"))
        self.blocks = StoringBlocks(
            self.layout,
            num_blocks,
            fences=fences,
            prefix_caching=True,
            zero_on_allocate=zero_on_allocate,
        )
        self.blocks.store_into(self.book)
        self.tiers = Tiers(self.blocks, self.layout, self.book)
        self.pool = [GARBAGE] * num_blocks
        self.slots = [GARBAGE] * num_slots
        self.storage: dict[BlockName, Content] = {}
        self.pending: dict[OperationId, TierAction] = {}
        self.runs: dict[Owner, TokenRun] = {}
        self.loading: set[Owner] = set()
        self.leased: set[Owner] = set()
        self.epoch = ""
        self.era = 0
        self.era_of: dict[Owner, int] = {}

    # Owners

    def admit(self, name: str, tokens: Iterable[int], *, attempt: int = 1) -> OperationId | None:
        """Admit with what pool and host memory have; return the load, if one was begun."""
        owner = owner_of(name, attempt)
        run = run_of(tokens, SIZE)
        most = len(run) - 1
        cached = self.blocks.count_cached_tokens(run, most)
        loaded = self.tiers.count_tokens(run, cached, most)
        load = None
        if loaded > cached:
            load = self.tiers.admit(owner, LoadedAdmission(run, cached, loaded, len(run)))
        else:
            self.blocks.admit(owner, tokens=run, num_cached_tokens=cached, num_tokens=len(run))
        self.runs[owner] = run
        self.era_of[owner] = self.era
        if load is None:
            self.check_hit(owner, cached)
        else:
            self.loading.add(owner)
        self.collect()
        return load

    def compute(self, name: str, *, attempt: int = 1) -> None:
        """Compute all of an owner's tokens and settle them."""
        owner = owner_of(name, attempt)
        run = self.runs[owner]
        for group, table in enumerate(self.blocks.block_tables(owner)):
            for index, digest in enumerate(run.digests(run.num_blocks)):
                if table[index] >= 0:
                    content = Content(BlockName(group, digest), self.era_of[owner])
                    self.pool[table[index]] = content
        self.blocks.settle(owner, len(run))

    def finish(self, name: str, *, attempt: int = 1) -> None:
        """Release an owner."""
        owner = owner_of(name, attempt)
        del self.runs[owner], self.era_of[owner]
        self.loading.discard(owner)
        self.leased.discard(owner)
        self.blocks.release(owner)
        self.collect()

    def lease(self, owner: Owner) -> None:
        """Promise an owner's blocks to a reader."""
        self.blocks.lease(owner)
        self.leased.add(owner)
        self.collect()

    def serve(self, name: str, tokens: Iterable[int]) -> None:
        """Admit, load or not, compute and release one owner; copies stay pending."""
        load = self.admit(name, tokens)
        if load is not None:
            self.perform(load)
            self.take_loads()
        self.compute(name)
        self.finish(name)

    def reset(self) -> None:
        """Forget everything."""
        self.era += 1
        self.blocks.reset_cache()

    def check_hit(self, owner: Owner, num_tokens: int) -> None:
        """Whatever a hit of ``num_tokens`` needs is in the owner's blocks, and not too old."""
        run = self.runs[owner]
        tables = self.blocks.block_tables(owner)
        digests = run.digests(num_tokens // SIZE)
        for at, group in enumerate(self.layout.groups):
            for indices in needed_blocks(group, SIZE, num_tokens):
                for index in indices:
                    held = self.pool[tables[at][index]]
                    wanted = Content(BlockName(at, digests[index]), self.era_of[owner])
                    assert held == wanted, (owner, at, index)

    # What moves

    def collect(self) -> None:
        """Take the actions that were decided."""
        for action in self.tiers.take_actions():
            self.pending[action.operation] = action

    def perform(self, operation: OperationId, *, failed: bool = False) -> None:
        """Do a pending action now, and answer it."""
        action = self.pending.pop(operation)
        match action:
            case CopyOut() | CopyIn():
                self._copy(action, failed=failed)
            case MarkEpoch():
                if not failed:
                    self.epoch = action.epoch
                self.tiers.marked(action.epoch, failed=failed)
            case _:
                self._use_storage(action, failed=failed)
        self.collect()

    def _copy(self, action: CopyOut | CopyIn, *, failed: bool) -> None:
        pairs = list(zip(action.block_ids, action.slots, strict=True))
        if isinstance(action, CopyIn):
            for block_id, slot in pairs:
                self.pool[block_id] = GARBAGE if failed else self.slots[slot]
            self.tiers.copied_in(action.operation, failed=failed)
            return
        if not failed:
            for block_id, slot in pairs:
                self.slots[slot] = self.pool[block_id]
        self.tiers.copied_out(action.operation, failed=failed)

    def _use_storage(self, action: Write | Find | Read, *, failed: bool) -> None:
        present = [not failed and name in self.storage for name in action.names]
        match action:
            case Write(operation, names, slots):
                if not failed:
                    self.storage.update(
                        (name, self.slots[slot]) for name, slot in zip(names, slots, strict=True)
                    )
                self.tiers.written(operation, [not failed] * len(names))
            case Find(operation, names):
                self.tiers.found(operation, (*present, False).index(False))
            case Read(operation, names, slots):
                for name, slot, has_landed in zip(names, slots, present, strict=True):
                    self.slots[slot] = self.storage[name] if has_landed else GARBAGE
                self.tiers.read(operation, present)

    def perform_all(self, *, failed: bool = False) -> None:
        """Do everything that is pending, and what follows from it."""
        while self.pending:
            self.perform(next(iter(self.pending)), failed=failed)

    def take_loads(self) -> list[EndedLoad]:
        """Settle the loads that ended well, and give up those that did not, as schedulers do."""
        ended = self.tiers.take_ended_loads()
        for load in ended:
            if load.owner not in self.loading:
                continue
            self.loading.remove(load.owner)
            if load.failed:
                self.finish(load.owner[0], attempt=load.owner[1])
                continue
            self.check_hit(load.owner, load.num_tokens)
            self.blocks.settle(load.owner, load.num_tokens)
        return ended

    def count(self, state: BlockState) -> int:
        return self.blocks.counts()[state]

    def check(self) -> None:
        """Everything holds what its name says, and every part is consistent."""
        self.blocks.check_invariants()
        self.book.check_invariants()
