"""What happened to each of the last requests in one process: when, what, a few numbers.

Every process keeps such a record of its own; ``router.trace_control`` puts those of one request
together. Nothing is recorded per token, so a request leaves some tens of entries.

Pure: the clock comes in. It must be the process's monotonic clock in seconds, at full resolution.
"""

from collections.abc import Callable
from typing import Annotated, Final, Literal, TypeAlias

import msgspec
from msgspec import Meta

from core.bounds import MAX_COUNT, Name
from core.ids import Attempt, Owner, RequestId

RouterEvent: TypeAlias = Literal[
    "arrived",  # the HTTP request was read
    "tokenized",  # tokens
    "dispatched",  # decode, prefill (absent: on decode), path, reason
    "attempt_failed",  # kind, reason
    "first_token",
    "finished",  # tokens, reason
    "failed",  # reason
    "left",  # cause: the client, a shutdown, another sequence's failure
]
DecodeEvent: TypeAlias = Literal[
    "received",  # tokens
    "prefix_hit",  # tokens that decode has already
    "prefill_asked",  # peer, first_token
    "ticket",  # chunk, first_layer, last_layer, blocks, tokens, last
    "allocated",  # operation, chunk, blocks
    "read_posted",  # operation, chunk, seconds that posting took
    "read_landed",  # operation, nbytes, descriptors, seconds, path
    "read_failed",  # operation, reason
    "lease_renewed",
    "delivered",  # nbytes, tickets
    "recomputing",  # reason: KV does not come, and is computed here
    "step",  # seconds, tokens: one that computed part of the prompt
    "first_token",
    "finished",  # tokens, reason, preemptions
    "aborted",
    "failed",  # kind, reason
]
PrefillEvent: TypeAlias = Literal[
    "received",  # tokens, first_token
    "admitted",  # tokens that prefill has already
    "step",  # chunk, seconds, tokens
    "ticket_sent",  # chunk, first_layer, last_layer, blocks, last
    "released",
    "withdrawn",
    "expired",
    "failed",  # reason
]
EventName: TypeAlias = RouterEvent | DecodeEvent | PrefillEvent
Value: TypeAlias = int | float | Annotated[str, Meta(max_length=1024)]

MAX_REQUESTS: Final = 512
MAX_EVENTS: Final = 256
"""Of one request: enough for 64 chunks with a ticket and a read each."""
ENDS: Final[frozenset[EventName]] = frozenset(
    {"finished", "failed", "left", "aborted", "released", "withdrawn", "expired"}
)
"""Recorded even where a request has had all its other entries: how it ended matters most."""


ClockTime = Annotated[float, Meta(ge=-1e12, le=1e12)]
"""Seconds of a monotonic clock, which begins anywhere."""


class TraceEvent(msgspec.Struct, frozen=True, array_like=True):
    """One entry."""

    at_s: ClockTime
    """Of the process's monotonic clock."""
    event: Name
    """An ``EventName``. Another version may know more of them, which says nothing against it."""
    attempt: Annotated[Attempt, Meta(ge=0, le=MAX_COUNT)]
    """0: before the first one."""
    values: Annotated[dict[Name, Value], Meta(max_length=32)]


_Entry: TypeAlias = tuple[float, EventName, Attempt, dict[str, Value]]


class Recorder:
    """The last ``max_requests`` requests of one process. Belongs to one event loop.

    Invariants (``check_invariants``):
        * at most ``max_requests`` requests are kept, those whose first entry is the newest;
        * a request has at most ``max_events`` entries beside its ends.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        *,
        max_requests: int = MAX_REQUESTS,
        max_events: int = MAX_EVENTS,
    ) -> None:
        """Record by ``clock``; with ``max_requests=0`` nothing is kept."""
        self._clock = clock
        self._max_requests = max_requests
        self._max_events = max_events
        self._entries: dict[RequestId, list[_Entry]] = {}

    @property
    def max_requests(self) -> int:
        """Requests that are kept."""
        return self._max_requests

    def now(self) -> float:
        """Return the clock's time, which entries are recorded by."""
        return self._clock()

    def record(self, owner: Owner, event: EventName, /, **values: Value) -> None:
        """Add an entry of now; the oldest request goes where one is too many."""
        self.record_at(self._clock(), owner, event, **values)

    def record_at(self, at_s: float, owner: Owner, event: EventName, /, **values: Value) -> None:
        """Add an entry of an earlier time, for what had no name then."""
        request_id, attempt = owner
        entries = self._entries.get(request_id)
        if entries is None:
            entries = self._begin(request_id)
        if len(entries) < self._max_events or event in ENDS:
            entries.append((at_s, event, attempt, values))

    def events(self, request_id: RequestId) -> tuple[TraceEvent, ...]:
        """Return a request's entries in order of recording; none: unknown, or gone by now."""
        return tuple(TraceEvent(*entry) for entry in self._entries.get(request_id, ()))

    def _begin(self, request_id: RequestId) -> list[_Entry]:
        entries: list[_Entry] = []
        if self._max_requests:
            if len(self._entries) >= self._max_requests:
                del self._entries[next(iter(self._entries))]
            self._entries[request_id] = entries
        return entries

    def check_invariants(self) -> None:
        """Assert the invariants above."""
        assert len(self._entries) <= self._max_requests, "more requests than are to be kept"
        for request_id, entries in self._entries.items():
            num_others = sum(entry[1] not in ENDS for entry in entries)
            assert num_others <= self._max_events, f"{request_id} has {num_others} entries"
