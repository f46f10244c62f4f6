"""Which copies between pool, host memory and storage are pending, and what they may use.

Pure: calls in, actions out; whoever moves bytes answers each action by its operation.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from blockmgr.host_tier import HostEntry, HostTier
from blockmgr.storage_book import NamesForHit, StorageBook
from blockmgr.tier_actions import TierActions
from blockmgr.tier_stats import TierStats
from core.cache_epoch import epoch_after
from core.config import CacheConfig
from core.errors import ConfigError
from core.ids import BlockId, Incarnation, OperationId, Owner
from core.kv_layout import KVLayout
from core.tiers import BlockName, CopyIn, CopyOut, MarkEpoch

MIB = 2**20
GIB = 2**30


@dataclass(frozen=True, slots=True)
class TierBounds:
    """How much a worker's tiers may use. What is over a bound is not begun, and never waits."""

    num_slots: int
    """Blocks in host memory."""
    max_copied_blocks: int
    """Blocks of the pool that unfinished copies to host memory keep from reuse."""
    max_staged_blocks: int
    """Blocks on their way to or from storage; 0: there is no storage."""

    @classmethod
    def of(cls, cache: CacheConfig, layout: KVLayout, *, num_blocks: int) -> "TierBounds | None":
        """Return the bounds beside a pool of ``num_blocks``; None: the tiers are off.

        Raises:
            ConfigError: the host tier or its staging part holds no block.
        """
        if not cache.host_tier_gib:
            return None
        nbytes = layout.block_nbytes
        num_slots = int(cache.host_tier_gib * GIB) // nbytes
        max_staged = cache.storage_staging_mib * MIB // nbytes
        for held, field, value, least in (
            (num_slots, "host_tier_gib", cache.host_tier_gib, f"{_gib_over(nbytes):.6f}"),
            (max_staged, "storage_staging_mib", cache.storage_staging_mib, -(-nbytes // MIB)),
        ):
            if not held:
                message = f"cache.{field}: {value} holds no block of {nbytes} bytes"
                raise ConfigError(f"{message}; give at least {least}")
        return cls(
            num_slots=num_slots,
            max_copied_blocks=max(1, int(cache.host_copy_fraction * num_blocks)),
            max_staged_blocks=0 if cache.storage_url is None else min(max_staged, num_slots),
        )


def _gib_over(nbytes: int) -> float:
    """Return a little more than ``nbytes``, in GiB with six decimals."""
    return (nbytes * 1_000_000 // GIB + 1) / 1_000_000


class TierBook:
    """Contents below the pool, and the operations that move them.

    Everything is matched by operation. An answer for an operation that is not pending is counted
    and dropped; an operation whose content was forgotten meanwhile still gives back its slots,
    exactly once, when it ends.

    Invariants: those of ``HostTier`` and ``StorageBook``; copies are within their bound; and pins
    are exactly those of the pending operations.
    """

    def __init__(self, bounds: TierBounds, *, incarnation: Incarnation) -> None:
        self.actions = TierActions()
        self.stats = TierStats()
        self.host = HostTier(bounds.num_slots)
        self.storage = (
            StorageBook(
                self.host,
                self.actions,
                self.stats,
                max_staged_blocks=bounds.max_staged_blocks,
            )
            if bounds.max_staged_blocks
            else None
        )
        self._bounds = bounds
        self._incarnation = incarnation
        self._epoch = ""
        self._chosen_epoch = ""
        self._marked_epoch = ""
        self.storage_reset: Literal["none", "pending", "done", "failed"] = "none"
        self._stores: dict[OperationId, list[HostEntry]] = {}
        self._loads: dict[OperationId, list[HostEntry]] = {}
        self._num_copied = 0

    def name(self, group: int, digest: bytes) -> BlockName:
        """Name a block's content. After a reset no name is what it was before."""
        if self._epoch:
            salted = self._epoch.encode() + digest
            digest = hashlib.blake2b(salted, digest_size=len(digest)).digest()
        return BlockName(group, digest)

    @property
    def num_copied_blocks(self) -> int:
        """Blocks of the pool that unfinished copies to host memory keep from reuse."""
        return self._num_copied

    @property
    def num_staged_blocks(self) -> int:
        """Blocks on their way to or from storage."""
        return self.storage.num_staged_blocks if self.storage is not None else 0

    # Pool to host memory

    def store(self, names: Sequence[BlockName], block_ids: Sequence[BlockId]) -> CopyOut | None:
        """Begin to copy those of ``block_ids`` whose content is not in host memory yet.

        ``names``, in order of position, name their content. None: all is there or on its way, or
        a bound is reached. Otherwise the blocks of the answer must keep their bytes until its
        operation has ended.
        """
        self.host.touch(names)
        pairs = zip(names, block_ids, strict=True)
        block_of_name = {name: block_id for name, block_id in pairs if name not in self.host}
        room = min(
            self._bounds.max_copied_blocks - self._num_copied,
            self.host.num_slots - (len(names) - len(block_of_name)),
        )
        entries = self.host.add(list(block_of_name)[: max(0, room)])
        self.stats.stores["skipped"] += len(block_of_name) - len(entries)
        if not entries:
            return None
        self.host.touch(names)
        operation = self.actions.new_operation()
        self._stores[operation] = entries
        self._num_copied += len(entries)
        copied = [block_of_name[entry.name] for entry in entries if entry.name is not None]
        copy = CopyOut(operation, tuple(copied), tuple(entry.slot for entry in entries))
        self.actions.append(copy)
        return copy

    def end_store(self, operation: OperationId, *, failed: bool) -> bool:
        """The copy is over. Return False, without a change, where ``operation`` is not pending."""
        entries = self._stores.pop(operation, None)
        if entries is None:
            self.stats.stale_answers += 1
            return False
        self._num_copied -= len(entries)
        self.stats.stores["failed" if failed else "done"] += len(entries)
        if self.storage is not None and not failed:
            self.storage.write(entries)
        for entry in entries:
            self.host.end_filling(entry, failed=failed)
        return True

    # Host memory to pool

    def load(
        self, operation: OperationId, names: Sequence[BlockName], block_ids: Sequence[BlockId]
    ) -> None:
        """Begin to copy ``names``, whose bytes are in host memory, into ``block_ids``.

        ``operation`` is a new one, and ``block_ids`` are its.
        """
        entries = self.host.take(names)
        self.host.touch(names)
        self._loads[operation] = entries
        slots = tuple(entry.slot for entry in entries)
        self.actions.append(CopyIn(operation, slots, tuple(block_ids)))

    def end_load(self, operation: OperationId, *, failed: bool) -> list[HostEntry] | None:
        """The copy is over. Return what was copied; None, unchanged: ``operation`` not pending."""
        entries = self._loads.pop(operation, None)
        if entries is None:
            self.stats.stale_answers += 1
            return None
        self.stats.loads["failed" if failed else "done"] += len(entries)
        for entry in entries:
            self.host.unpin(entry)
        return entries

    # Storage

    def fetch(self, owner: Owner, chain: Sequence[BlockName], names_for_hit: NamesForHit) -> None:
        """Begin to look for ``chain`` in storage, if there is one, for ``owner`` to wait for."""
        if self.storage is not None and chain:
            self.storage.fetch(owner, chain, names_for_hit)

    def is_fetching(self, owner: Owner) -> bool:
        """Whether ``owner`` may gain by waiting: what it wants is on its way from storage."""
        return self.storage is not None and self.storage.is_fetching(owner)

    def forget_owner(self, owner: Owner) -> None:
        """``owner`` waits no more."""
        if self.storage is not None:
            self.storage.forget_owner(owner)

    # Resets

    @property
    def epoch(self) -> str:
        """What names are salted with: the newest reset that is known; "": none."""
        return self._epoch

    def choose_epoch(self, epoch: str) -> None:
        """Let the next reset begin ``epoch``, as on every other worker of the storage."""
        self._chosen_epoch = epoch

    def forget_all(self) -> None:
        """Nothing stored up to now can be hit any more, in storage neither.

        Without a chosen epoch it is one of this worker alone. One that is not newer than that of
        another reset comes too late: all go by the newer one, and ``storage_reset`` is "failed",
        since what was stored between the two stays. The epoch that there is changes nothing below
        host memory: it was told twice.
        """
        epoch, self._chosen_epoch = self._chosen_epoch, ""
        epoch = epoch or epoch_after(self._epoch, by=self._incarnation)
        is_newer, is_known = epoch > self._epoch, epoch == self._epoch
        self._epoch = max(epoch, self._epoch)
        self.host.forget_all()
        if self.storage is None or is_known:
            return
        self.storage.forget_all()
        self.storage_reset = "pending" if is_newer else "failed"
        self._marked_epoch = epoch if is_newer else ""
        if is_newer:
            self.actions.append(MarkEpoch(self.actions.new_operation(), epoch))

    def marked(self, epoch: str, *, failed: bool) -> None:
        """``epoch`` is in storage, for later workers to begin with, or ``failed`` to get there."""
        if epoch == self._marked_epoch:
            self.storage_reset = "failed" if failed else "done"

    def begin_epoch(self, epoch: str) -> None:
        """The storage was reset to ``epoch`` before; called at the start, when nothing is here."""
        self._epoch = epoch

    def check_invariants(self) -> None:
        """Assert the invariants above."""
        self.host.check_invariants()
        copied = [entry for entries in self._stores.values() for entry in entries]
        assert self._num_copied == len(copied) <= self._bounds.max_copied_blocks
        pinned = copied + [entry for entries in self._loads.values() for entry in entries]
        if self.storage is not None:
            self.storage.check_invariants()
            pinned += self.storage.pinned()
        assert sum(entry.pins for entry in set(pinned)) == len(pinned), "pins are not operations"
        assert len(set(pinned)) == self.host.num_pinned, "a pin outlived its operation"
