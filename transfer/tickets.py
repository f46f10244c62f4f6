"""The prefill side of a transfer: which requests' blocks are promised to a reader, until when.

Pure: time comes in as an argument, of one monotonic clock. Deadlines never travel; messages carry
durations, so the clocks of two machines are never compared.
"""

from collections import OrderedDict
from dataclasses import dataclass
from enum import Enum, auto
from typing import Literal

from core.ids import Incarnation, Owner
from core.messages import (
    FirstToken,
    GroupBlocks,
    PieceId,
    Released,
    Renew,
    Renewed,
    Ticket,
    Withdraw,
)
from transfer.stats import TransferStats

_REMEMBERED_ENDS = 4096


@dataclass(frozen=True, slots=True)
class Offer:
    """What one ticket promises, apart from the lease."""

    piece: PieceId
    blocks: tuple[GroupBlocks, ...]
    num_tokens: int
    last: bool = False
    first_token: FirstToken | None = None
    num_cached_tokens: int = 0
    prefill_s: float = 0.0


class _State(Enum):
    OPEN = auto()
    """Being computed; no ticket yet, so no lease runs."""
    LEASED = auto()
    """At least one ticket is out."""
    REVOKED = auto()
    """The source gave up. A reader that does not know yet may still trust what it reads: the
    blocks stay until it answers or the lease ends."""


@dataclass(slots=True, eq=False)
class _Entry:
    owner: Owner
    reader: str
    lease_s: float
    state: _State = _State.OPEN
    deadline: float | None = None

    def extend(self, deadline: float) -> None:
        """Move the end of the lease; never to an earlier time."""
        self.deadline = deadline if self.deadline is None else max(self.deadline, deadline)


class TicketBook:
    """Every request that a reader has asked for, until its blocks may be freed.

    Each owner is returned as free exactly once: by ``released``, ``withdraw``, ``revoke``,
    ``expire``, ``reader_lost`` or ``reader_dead``. What comes later for it is counted and changes
    nothing.

    A reader that is lost is not dead: it may be partitioned, and trust what it reads until its
    lease ends. So its leases run on, unless the caller has proof (``reader_dead``).
    """

    def __init__(
        self, incarnation: Incarnation, lease_s: float, *, extension_s: float | None = None
    ) -> None:
        """Begin with nothing.

        Args:
            incarnation: Of this process; in every ticket, and demanded of every release.
            lease_s: How long a ticket is good.
            extension_s: By how much a renewal extends it, from its receipt; ``lease_s`` if None.
        """
        self._incarnation = incarnation
        self._lease_s = lease_s
        self._extension_s = extension_s
        self._entries: dict[Owner, _Entry] = {}
        self._ended: OrderedDict[Owner, None] = OrderedDict()
        self._num_leased = 0
        self.stats = TransferStats()

    def __len__(self) -> int:
        """Requests that are not free yet."""
        return len(self._entries)

    def __contains__(self, owner: Owner) -> bool:
        return owner in self._entries

    @property
    def num_leased(self) -> int:
        """Requests with a ticket out."""
        return self._num_leased

    def open(self, owner: Owner, *, reader: str, lease_s: float | None = None) -> bool:
        """A reader asks for ``owner``. Return whether to compute it.

        False where it is here already, has ended before, or a newer attempt is here: a request
        that comes twice, or late, is never served from what its blocks hold now.
        """
        is_outdated = any(other[0] == owner[0] and other[1] > owner[1] for other in self._entries)
        if owner in self._entries or owner in self._ended or is_outdated:
            self.stats.stale["prefill"] += 1
            return False
        self._entries[owner] = _Entry(owner, reader, lease_s or self._lease_s)
        return True

    def issue(self, owner: Owner, offer: Offer, now: float) -> Ticket | None:
        """Return the ticket for ``offer``; None where nobody wants ``owner`` any more.

        The lease runs from now: no time of the computation counts against it.
        """
        entry = self._entries.get(owner)
        if entry is None or entry.state is _State.REVOKED:
            self.stats.stale["offer"] += 1
            return None
        self._num_leased += entry.state is _State.OPEN
        entry.state = _State.LEASED
        entry.extend(now + entry.lease_s)
        self.stats.lease_events["granted"] += 1
        request_id, attempt = owner
        return Ticket(
            request_id=request_id,
            attempt=attempt,
            incarnation=self._incarnation,
            piece=offer.piece,
            blocks=offer.blocks,
            num_tokens=offer.num_tokens,
            lease_s=entry.lease_s,
            last=offer.last,
            first_token=offer.first_token,
            num_cached_tokens=offer.num_cached_tokens,
            prefill_s=offer.prefill_s,
        )

    def renew(self, message: Renew, now: float, *, reader: str | None = None) -> Renewed:
        """Extend what is held, and tell the reader what is void.

        A request that is still computed has no lease to extend, but is held. What another than
        ``reader`` has asked for is void to it; None: whoever it is, it is believed.
        """
        good: list[Owner] = []
        void: list[Owner] = []
        extensions_s = [self._lease_s if self._extension_s is None else self._extension_s]
        for owner in message.requests:
            entry = self._of_reader(owner, reader)
            if entry is None or entry.state is _State.REVOKED:
                self.stats.lease_events["voided"] += 1
                void.append(owner)
                continue
            extension_s = entry.lease_s if self._extension_s is None else self._extension_s
            if entry.state is _State.LEASED:
                entry.extend(now + extension_s)
                self.stats.lease_events["renewed"] += 1
            extensions_s.append(extension_s)
            good.append(owner)
        return Renewed(
            sequence=message.sequence,
            incarnation=self._incarnation,
            requests=tuple(good),
            void=tuple(void),
            lease_s=min(extensions_s),
        )

    def released(self, message: Released, *, reader: str | None = None) -> Owner | None:
        """The reader has everything. Return the owner to free; None: void, and counted.

        A release of an older life of this worker, after the end, or by another than ``reader``,
        harms nobody.
        """
        if message.incarnation != self._incarnation:
            self.stats.stale["released_incarnation"] += 1
            return None
        return self._end((message.request_id, message.attempt), "released", reader)

    def withdraw(self, message: Withdraw, *, reader: str | None = None) -> Owner | None:
        """The reader will trust no byte. Return the owner to free; None: unknown, and counted."""
        return self._end((message.request_id, message.attempt), "withdrawn", reader)

    def void(self, owner: Owner) -> Renewed:
        """Return the message that tells a reader, unasked, that ``owner`` is void."""
        return Renewed(
            sequence=0,
            incarnation=self._incarnation,
            requests=(),
            void=(owner,),
            lease_s=self._lease_s,
        )

    def revoke(self, owner: Owner) -> bool:
        """The source gives ``owner`` up; the reader is told by ``PrefillFailed``.

        Return whether its blocks may be freed now. Where a ticket is out, they may only when the
        reader answers (``withdraw``) or the lease ends: until it knows, it may trust them.
        """
        entry = self._entries.get(owner)
        if entry is None:
            return False
        self.stats.lease_events["revoked"] += 1
        if entry.state is _State.OPEN:
            self._forget(owner)
            return True
        entry.state = _State.REVOKED
        return False

    def reader_dead(self, reader: str) -> list[Owner]:
        """Return the owners of a reader that is *proven* dead: their blocks may be freed."""
        owners = [entry.owner for entry in self._entries.values() if entry.reader == reader]
        for owner in owners:
            self._forget(owner)
        return owners

    def reader_lost(self, reader: str) -> list[Owner]:
        """Nothing is heard of ``reader``. Return its owners without a ticket out: free now.

        The others run to the end of their lease.
        """
        owners = [
            entry.owner
            for entry in self._entries.values()
            if entry.reader == reader and entry.state is _State.OPEN
        ]
        for owner in owners:
            self._forget(owner)
        return owners

    def next_deadline(self) -> float | None:
        """Return when ``expire`` has something to return."""
        deadlines = (entry.deadline for entry in self._entries.values())
        return min((time for time in deadlines if time is not None), default=None)

    def expire(self, now: float) -> list[Owner]:
        """Return the owners whose lease has ended: their blocks may be freed."""
        owners = [
            entry.owner
            for entry in self._entries.values()
            if entry.deadline is not None and entry.deadline <= now
        ]
        for owner in owners:
            self.stats.lease_events["expired"] += 1
            self._forget(owner)
        return owners

    def _of_reader(self, owner: Owner, reader: str | None) -> _Entry | None:
        entry = self._entries.get(owner)
        return None if entry is not None and reader not in {None, entry.reader} else entry

    def _end(
        self, owner: Owner, event: Literal["released", "withdrawn"], reader: str | None
    ) -> Owner | None:
        if self._of_reader(owner, reader) is None:
            self.stats.lease_events["late"] += owner in self._ended
            self.stats.stale[event] += 1
            return None
        self.stats.lease_events[event] += 1
        self._forget(owner)
        return owner

    def _forget(self, owner: Owner) -> None:
        self._num_leased -= self._entries.pop(owner).state is not _State.OPEN
        self._ended[owner] = None
        while len(self._ended) > _REMEMBERED_ENDS:
            self._ended.popitem(last=False)
