"""Requests until they end: applies the reader's table to each, and says what follows."""

from collections.abc import Iterable, Sequence

from core.config import TransferConfig
from core.errors import InvalidTransitionError
from core.ids import Incarnation, OperationId, Owner
from core.messages import Released, Withdraw
from transfer.actions import Action
from transfer.endpoints import Endpoints
from transfer.operations import Operation
from transfer.reader_states import Effect, Event, PieceState, State, advance
from transfer.receiving import Failure, Piece, Receiving
from transfer.stats import StaleKind, TransferStats


class Receptions:
    """Every request that is being received, oldest first. One that ends has no entry."""

    def __init__(
        self,
        config: TransferConfig,
        endpoints: Endpoints,
        stats: TransferStats,
    ) -> None:
        self._config = config
        self._endpoints = endpoints
        self._stats = stats
        self._entries: dict[Owner, Receiving] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, owner: Owner) -> bool:
        return owner in self._entries

    def all(self) -> Iterable[Receiving]:
        """Return every entry."""
        return self._entries.values()

    def get(self, owner: Owner) -> Receiving | None:
        """Return the entry of ``owner``, if it has not ended."""
        return self._entries.get(owner)

    def expect(self, owner: Owner, source: Incarnation, kind: StaleKind) -> Receiving | None:
        """Return the entry that a message is for; where there is none, the message is stale."""
        entry = self._entries.get(owner)
        if entry is None or entry.source != source:
            self._stats.stale[kind] += 1
            return None
        return entry

    def of_source(self, source: Incarnation, owners: Sequence[Owner]) -> list[Receiving]:
        """Return the entries among ``owners`` that read from ``source``."""
        entries = (self._entries.get(owner) for owner in owners)
        return [entry for entry in entries if entry is not None and entry.source == source]

    def filled_by(self, pending: Operation) -> tuple[Receiving, Piece] | None:
        """Return what a terminal read was for; None: nobody waits for it any more."""
        if pending.is_quarantined:
            return None
        entry = self._entries[pending.owner]
        return entry, entry.pieces[pending.piece]

    def begin(self, entry: Receiving) -> list[Action]:
        """Add an entry.

        Raises:
            InvalidTransitionError: its owner has one.
        """
        if entry.owner in self._entries:
            raise InvalidTransitionError(f"{entry.owner} is being received already")
        self._entries[entry.owner] = entry
        return self._endpoints.add(entry.owner, entry.source, entry.requested_at)

    def settle(self, entry: Receiving, now: float) -> list[Action]:
        """Deliver ``entry`` if every piece has landed while its lease was good."""
        if not entry.is_complete():
            return []
        if entry.first_token is None:
            return self.fail(entry, Failure("protocol", "no ticket has the first token"), now)
        event = Event.COMPLETE_PROVEN if entry.is_proven else Event.COMPLETE_UNPROVEN
        return self.apply(entry, event, now)

    def fail(self, entry: Receiving, failure: Failure, now: float) -> list[Action]:
        """End ``entry`` because of ``failure``."""
        entry.failure = failure
        return self.apply(entry, Event.FAILED, now)

    def apply(self, entry: Receiving, event: Event, now: float) -> list[Action]:
        """Move ``entry`` on. A request that is GONE leaves its outstanding reads in quarantine."""
        entry.state, effects = advance(entry.state, event)
        actions = [action for effect in effects for action in self._carry_out(effect, entry, now)]
        if entry.state is not State.GONE:
            return actions
        del self._entries[entry.owner]
        for piece in entry.pieces.values():
            actions += self.abandon(piece)
        self._endpoints.remove(entry.owner, entry.source)
        return [*actions, *self._endpoints.bound_quarantine()]

    def abandon(self, piece: Piece) -> list[Action]:
        """Its read, if one is outstanding, goes on in quarantine as far as it is posted."""
        if piece.state is PieceState.READING and piece.operation is not None:
            return self._endpoints.quarantine(piece.operation)
        return []

    def next_deadline(self) -> float | None:
        """Return when the first entry fails if nothing happens."""
        deadlines = (entry.deadline(self._config) for entry in self._entries.values())
        return min((time for time in deadlines if time is not None), default=None)

    def tick(self, now: float) -> list[Action]:
        """Fail the entries whose deadline has passed."""
        actions: list[Action] = []
        for entry in list(self._entries.values()):
            deadline = entry.deadline(self._config)
            if deadline is not None and deadline <= now:
                actions += self.fail(entry, entry.timeout(now), now)
        return actions

    def check_invariants(self) -> set[OperationId]:
        """Assert that entries and sources agree; return the reads that entries wait for."""
        reading: set[OperationId] = set()
        for owner, entry in self._entries.items():
            assert entry.owner == owner
            assert entry.state is not State.GONE
            assert owner in self._endpoints.owners(entry.source)
            for piece in entry.pieces.values():
                if piece.state is PieceState.READING:
                    assert piece.operation is not None
                    reading.add(piece.operation)
        return reading

    def _carry_out(self, effect: Effect, entry: Receiving, now: float) -> list[Action]:
        request_id, attempt = entry.owner
        match effect:
            case Effect.DELIVER:
                self._stats.deliveries += 1
                return [entry.deliver()]
            case Effect.FAIL:
                self._stats.failures[entry.failure.stage] += 1
                return [entry.fail()]
            case Effect.CONFIRM:
                self._stats.lease_events["confirmed"] += 1
                entry.confirm_before = now + self._config.read_timeout_s
                return self._endpoints.renew(entry.source, now)
            case Effect.RELEASE:
                self._stats.lease_events["released"] += 1
                released = Released(request_id, attempt, entry.source)
                return self._endpoints.send(entry.source, released)
            case Effect.WITHDRAW:
                self._stats.lease_events["withdrawn"] += 1
                return self._endpoints.send(entry.source, Withdraw(request_id, attempt))
