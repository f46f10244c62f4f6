"""Which writes to and reads from storage are pending, and who waits for them."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from blockmgr.host_tier import HostEntry, HostTier
from blockmgr.tier_actions import TierActions
from blockmgr.tier_stats import TierStats
from core.ids import OperationId, Owner
from core.tiers import BlockName, Find, HostSlot, Read, Write

NamesForHit = Callable[[int], Sequence[BlockName]]
"""The names that a hit needs which goes on for so many blocks of the chain."""
MAX_FETCHES = 64
"""Chains being looked for or read at once."""
_REMEMBERED_NAMES = 1 << 17


@dataclass(slots=True, eq=False)
class _Fetch:
    owners: set[Owner]
    chain: tuple[BlockName, ...]
    names_for_hit: NamesForHit
    entries: list[HostEntry] = field(default_factory=list[HostEntry])
    is_found: bool = False
    is_void: bool = False
    """Nothing that it finds may be used: a reset came between."""


class StorageBook:
    """Moves contents between host memory and storage; the pool never waits for either.

    What is on its way keeps its host slots pinned, at most ``max_staged_blocks`` of them. Over
    that, a write is not begun, and a fetch is cut short.

    Invariants (``check_invariants``):
        * the staged blocks are those of the pending operations, and within the bound;
        * an owner waits for at most one fetch, and that fetch knows it.
    """

    def __init__(
        self, host: HostTier, actions: TierActions, stats: TierStats, *, max_staged_blocks: int
    ) -> None:
        self._host = host
        self._actions = actions
        self._stats = stats
        self._max_staged = max_staged_blocks
        self._num_staged = 0
        self._writes: dict[OperationId, list[HostEntry]] = {}
        self._fetches: dict[OperationId, _Fetch] = {}
        self._fetch_of_name: dict[BlockName, OperationId] = {}
        self._fetch_of_owner: dict[Owner, OperationId] = {}
        self._known: OrderedDict[BlockName, None] = OrderedDict()

    @property
    def num_staged_blocks(self) -> int:
        """Blocks on their way to or from storage."""
        return self._num_staged

    @property
    def num_known_blocks(self) -> int:
        """Blocks that are known to be in storage: written or found by this worker."""
        return len(self._known)

    # Host memory to storage

    def write(self, entries: Sequence[HostEntry]) -> None:
        """Begin to write those of ``entries`` that storage is not known to have."""
        wanted = [e for e in entries if e.name is not None and e.name not in self._known]
        chosen = wanted[: self._max_staged - self._num_staged]
        self._stats.writes["skipped"] += len(wanted) - len(chosen)
        if not chosen:
            return
        for entry in chosen:
            self._host.pin(entry)
        operation = self._actions.new_operation()
        self._writes[operation] = chosen
        self._num_staged += len(chosen)
        self._actions.append(Write(operation, _names(chosen), _slots(chosen)))

    def end_write(self, operation: OperationId, written: Sequence[bool]) -> bool:
        """The write is over; ``written`` tells of which block. False: it is not pending."""
        entries = self._writes.pop(operation, None)
        if entries is None:
            self._stats.stale_answers += 1
            return False
        self._num_staged -= len(entries)
        for entry, is_written in zip(entries, written, strict=True):
            self._stats.writes["done" if is_written else "failed"] += 1
            if is_written and entry.name is not None:
                self._remember(entry.name)
            self._host.unpin(entry)
        return True

    # Storage to host memory

    def fetch(self, owner: Owner, chain: Sequence[BlockName], names_for_hit: NamesForHit) -> None:
        """Begin to look for ``chain`` in storage, and let ``owner`` wait for it.

        Whoever wants a chain that begins like one on its way waits for that one. Over a bound
        nothing is begun, and the owner does not wait. An owner waits for one chain at a time.
        """
        if owner in self._fetch_of_owner:
            return
        pending = self._fetch_of_name.get(chain[0])
        if pending is not None:
            self._fetches[pending].owners.add(owner)
            self._fetch_of_owner[owner] = pending
            return
        if len(self._fetches) >= MAX_FETCHES or self._num_staged >= self._max_staged:
            self._stats.lookups["skipped"] += 1
            return
        operation = self._actions.new_operation()
        self._fetches[operation] = _Fetch({owner}, tuple(chain), names_for_hit)
        self._fetch_of_name[chain[0]] = self._fetch_of_owner[owner] = operation
        self._actions.append(Find(operation, tuple(chain)))

    def is_fetching(self, owner: Owner) -> bool:
        """Whether what ``owner`` wants is on its way."""
        return owner in self._fetch_of_owner

    def forget_owner(self, owner: Owner) -> None:
        """``owner`` waits no more. What is on its way still comes, for others."""
        operation = self._fetch_of_owner.pop(owner, None)
        if operation is not None:
            self._fetches[operation].owners.discard(owner)

    def found(self, operation: OperationId, count: int) -> bool:
        """Storage has the first ``count`` of the chain. False: not pending, or known already."""
        fetch = self._fetches.get(operation)
        if fetch is None or fetch.is_found:
            self._stats.stale_answers += 1
            return False
        fetch.is_found = True
        if not fetch.is_void:
            self._begin_read(operation, fetch, count)
        if not fetch.entries:
            self._end_fetch(operation, fetch)
        return True

    def end_read(self, operation: OperationId, landed: Sequence[bool]) -> bool:
        """The read is over; ``landed`` tells which blocks can be trusted. False: not pending."""
        fetch = self._fetches.get(operation)
        if fetch is None or not fetch.entries:
            self._stats.stale_answers += 1
            return False
        for entry, has_landed in zip(fetch.entries, landed, strict=True):
            self._stats.reads["done" if has_landed else "failed"] += 1
            if not has_landed and entry.name is not None:
                self._known.pop(entry.name, None)
            self._host.end_filling(entry, failed=not has_landed)
        self._num_staged -= len(fetch.entries)
        self._end_fetch(operation, fetch)
        return True

    def forget_all(self) -> None:
        """Nothing that was found or written up to now may be used."""
        self._known.clear()
        self._fetch_of_name.clear()
        for fetch in self._fetches.values():
            fetch.is_void = True

    def pinned(self) -> list[HostEntry]:
        """The entries of the pending operations, once per operation."""
        entries = [entry for entries in self._writes.values() for entry in entries]
        return entries + [entry for fetch in self._fetches.values() for entry in fetch.entries]

    def __len__(self) -> int:
        """Pending operations."""
        return len(self._writes) + len(self._fetches)

    def check_invariants(self) -> None:
        """Assert the invariants above."""
        assert self._num_staged == len(self.pinned()) <= self._max_staged
        waiting = [(owner, op) for op, fetch in self._fetches.items() for owner in fetch.owners]
        assert len(waiting) == len(self._fetch_of_owner), "an owner waits for two fetches, or none"
        assert dict(waiting) == self._fetch_of_owner, "a waiting owner is not known to its fetch"

    def _begin_read(self, operation: OperationId, fetch: _Fetch, count: int) -> None:
        self._stats.lookups["found" if count else "missed"] += 1
        if not count:
            return
        for name in fetch.chain[:count]:
            self._remember(name)
        names = [name for name in fetch.names_for_hit(count) if name not in self._host]
        room = self._max_staged - self._num_staged
        fetch.entries = self._host.add(names[:room], from_storage=True)
        self._num_staged += len(fetch.entries)
        self._stats.reads["skipped"] += len(names) - len(fetch.entries)
        if fetch.entries:
            self._actions.append(Read(operation, _names(fetch.entries), _slots(fetch.entries)))

    def _end_fetch(self, operation: OperationId, fetch: _Fetch) -> None:
        del self._fetches[operation]
        if self._fetch_of_name.get(fetch.chain[0]) == operation:
            del self._fetch_of_name[fetch.chain[0]]
        for owner in fetch.owners:
            del self._fetch_of_owner[owner]

    def _remember(self, name: BlockName) -> None:
        """Storage has ``name``. Bounded: what is forgotten is written once more."""
        self._known[name] = None
        self._known.move_to_end(name)
        while len(self._known) > _REMEMBERED_NAMES:
            self._known.popitem(last=False)


def _names(entries: Sequence[HostEntry]) -> tuple[BlockName, ...]:
    return tuple(entry.name for entry in entries if entry.name is not None)


def _slots(entries: Sequence[HostEntry]) -> tuple[HostSlot, ...]:
    return tuple(entry.slot for entry in entries)
