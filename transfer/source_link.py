"""What the reader knows of one source: renewals on their way, and whether it must progress."""

from dataclasses import dataclass, field

from core.ids import Incarnation, OperationId, Owner
from core.messages import Reading, Renew, Renewed


@dataclass(slots=True, eq=False)
class SourceLink:
    """One source process, as one reader sees it."""

    incarnation: Incarnation
    renew_interval_s: float
    owners: dict[Owner, None] = field(default_factory=dict[Owner, None])
    """Live requests, in order of their start."""
    operations: set[OperationId] = field(default_factory=set[OperationId])
    """Reads that are not terminal, the quarantined included."""
    is_lost: bool = False
    """Nothing can be sent to it any more."""
    torn: set[OperationId] = field(default_factory=set[OperationId])
    """Reads whose tear-down was asked for. Not those over a channel of later: nobody ends these."""
    next_renew_at: float | None = None
    _sent_at: dict[int, float] = field(default_factory=dict[int, float])
    _said_reading: bool = False

    def reopen(self) -> None:
        """A new channel leads to it: nothing that was said on the old one counts."""
        self.is_lost = False
        self._sent_at.clear()
        self._said_reading = False

    def add(self, owner: Owner, now: float) -> None:
        """A request to this source began."""
        self.owners[owner] = None
        if self.next_renew_at is None:
            self.next_renew_at = now + self.renew_interval_s

    def remove(self, owner: Owner) -> None:
        """The request ended; nothing of it is renewed any more."""
        self.owners.pop(owner, None)
        if not self.owners:
            self.next_renew_at = None

    def is_renewal_due(self, now: float) -> bool:
        """Whether its leases want a renewal."""
        return not self.is_lost and self.next_renew_at is not None and self.next_renew_at <= now

    def end(self, operation: OperationId) -> bool:
        """A read is terminal. Return whether its tear-down was asked for."""
        was_torn = operation in self.torn
        self.operations.discard(operation)
        self.torn.discard(operation)
        return was_torn

    def renew(self, sequence: int, now: float) -> Renew:
        """Return the message that renews every live request: one for all."""
        self._sent_at[sequence] = now
        self.next_renew_at = now + self.renew_interval_s
        return Renew(sequence=sequence, requests=tuple(self.owners))

    def acknowledge(self, message: Renewed) -> float | None:
        """Return when the ``Renew`` that ``message`` answers was sent; None: it is stale."""
        sent_at = self._sent_at.pop(message.sequence, None)
        if sent_at is not None:
            # The channel keeps order: what was sent before is not answered any more.
            for sequence in [old for old in self._sent_at if old < message.sequence]:
                del self._sent_at[sequence]
        return sent_at

    def reading_edge(self) -> Reading | None:
        """Return the message for a change between "reads are outstanding" and "none are"."""
        is_reading = bool(self.operations)
        if self.is_lost or is_reading == self._said_reading:
            return None
        self._said_reading = is_reading
        return Reading(active=is_reading)
