"""Which blocks' contents are in host memory, and which may be thrown out for others."""

from collections import OrderedDict
from collections.abc import Sequence

from core.tiers import BlockName, HostSlot


class HostEntry:
    """One slot in use. Operations hold entries, not names: a name can pass to another entry."""

    __slots__ = ("is_filled", "is_from_storage", "name", "pins", "slot")

    def __init__(self, name: BlockName, slot: HostSlot, *, is_from_storage: bool) -> None:
        self.name: BlockName | None = name
        """None: forgotten; the slot is free once its last pin is gone."""
        self.slot = slot
        self.is_filled = False
        self.is_from_storage = is_from_storage
        """Whether storage, not the pool, filled it."""
        self.pins = 1
        """Operations that read or fill the slot."""


class HostTier:
    """A bounded table of contents, the least recently used one thrown out first.

    Invariants (``check_invariants``):
        * a slot is free or belongs to exactly one entry;
        * an entry without a name is pinned;
        * an entry that is not filled is pinned: by the operation that fills it;
        * ``num_pinned`` is what a walk over all entries counts.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.num_evictions = 0
        self.num_pinned = 0
        """Entries that an operation uses."""
        self._free = [HostSlot(slot) for slot in reversed(range(num_slots))]
        self._entry_of_name: OrderedDict[BlockName, HostEntry] = OrderedDict()
        self._forgotten: set[HostEntry] = set()

    def __len__(self) -> int:
        """Named entries, filled or being filled."""
        return len(self._entry_of_name)

    def __contains__(self, name: BlockName) -> bool:
        """Whether ``name`` is here or on its way."""
        return name in self._entry_of_name

    def has(self, name: BlockName) -> bool:
        """Whether the bytes of ``name`` are here."""
        entry = self._entry_of_name.get(name)
        return entry is not None and entry.is_filled

    def names(self) -> list[BlockName]:
        """All contents that are here or on their way, the least recently used first."""
        return list(self._entry_of_name)

    @property
    def num_used(self) -> int:
        """Slots that are not free."""
        return self.num_slots - len(self._free)

    def take(self, names: Sequence[BlockName]) -> list[HostEntry]:
        """Pin and return the filled entries of ``names``."""
        entries = [self._entry_of_name[name] for name in names]
        for entry in entries:
            self.pin(entry)
        return entries

    def pin(self, entry: HostEntry) -> None:
        """Keep ``entry``, forgotten or not, until it is unpinned once more."""
        self.num_pinned += not entry.pins
        entry.pins += 1

    def add(self, names: Sequence[BlockName], *, from_storage: bool = False) -> list[HostEntry]:
        """Give slots to leading ones of ``names``, none of them here, as far as there are any.

        The new entries are pinned and not filled. Whatever no operation uses is thrown out for
        them, so this never waits.
        """
        entries: list[HostEntry] = []
        for name in names:
            slot = self._take_slot()
            if slot is None:
                break
            entry = HostEntry(name, slot, is_from_storage=from_storage)
            self._entry_of_name[name] = entry
            self.num_pinned += 1
            entries.append(entry)
        return entries

    def end_filling(self, entry: HostEntry, *, failed: bool) -> None:
        """What filled ``entry`` is done; ``failed``: its bytes are not to be used."""
        if not failed:
            entry.is_filled = True
        elif entry.name is not None:
            del self._entry_of_name[entry.name]
            entry.name = None
            self._forgotten.add(entry)
        self.unpin(entry)

    def unpin(self, entry: HostEntry) -> None:
        """One operation is done with ``entry``."""
        entry.pins -= 1
        self.num_pinned -= not entry.pins
        if entry.name is None and not entry.pins:
            self._forgotten.remove(entry)
            self._free.append(entry.slot)

    def touch(self, names: Sequence[BlockName]) -> None:
        """Make those of ``names`` that are here the most recently used, the first most of all.

        A prefix is worth more than what follows it, which nobody can use alone.
        """
        for name in reversed(names):
            if name in self._entry_of_name:
                self._entry_of_name.move_to_end(name)

    def forget_all(self) -> None:
        """Nothing that is here, or on its way, can be found any more."""
        for entry in self._entry_of_name.values():
            entry.name = None
            if entry.pins:
                self._forgotten.add(entry)
            else:
                self._free.append(entry.slot)
        self._entry_of_name.clear()

    def check_invariants(self) -> None:
        """Assert the invariants above."""
        entries = [*self._entry_of_name.values(), *self._forgotten]
        slots = sorted([*self._free, *(entry.slot for entry in entries)])
        assert slots == list(range(self.num_slots)), f"slots lost or doubled: {slots}"
        pinned = sum(entry.pins > 0 for entry in entries)
        assert self.num_pinned == pinned, f"{self.num_pinned} for {pinned} pinned"
        assert all(entry.pins > 0 and entry.name is None for entry in self._forgotten)
        for name, entry in self._entry_of_name.items():
            assert entry.name == name, f"{entry.name} is listed as {name}"
            assert entry.is_filled or entry.pins, f"nothing fills {name}"

    def _take_slot(self) -> HostSlot | None:
        if self._free:
            return self._free.pop()
        for name, entry in self._entry_of_name.items():
            if not entry.pins:
                del self._entry_of_name[name]
                self.num_evictions += 1
                return entry.slot
        return None
