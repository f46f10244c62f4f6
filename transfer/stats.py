"""What the transfer counts: monotonic, read by the worker that exports metrics."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeAlias, get_args

LeaseEvent: TypeAlias = Literal[
    "granted",
    "renewed",
    "confirmed",
    "released",
    "withdrawn",
    "revoked",
    "expired",
    "voided",
    "late",
]
FailureStage: TypeAlias = Literal[
    "handshake", "prefill", "read", "lease", "peer", "protocol", "integrity"
]
StaleKind: TypeAlias = Literal[
    "prefill",
    "offer",
    "ticket",
    "duplicate_ticket",
    "renewed",
    "prefill_failed",
    "allocation",
    "outcome",
    "released",
    "released_incarnation",
    "withdrawn",
]
MAX_POSTS: Final = 4096
STALE_EPOCHS: Final[tuple[StaleKind, ...]] = (
    "prefill",
    "ticket",
    "renewed",
    "prefill_failed",
    "released",
    "released_incarnation",
    "withdrawn",
)
"""Those that name an attempt or an incarnation which is over; the others are of reads."""


def _zeros(literal: Any) -> Callable[[], dict[Any, int]]:  # noqa: ANN401 - a form of typing
    return lambda: dict.fromkeys(get_args(literal), 0)


@dataclass(frozen=True, slots=True)
class ReadObservation:
    """One completed read, for histograms."""

    nbytes: int
    num_descriptors: int
    duration_s: float
    """From the decision to read until its end was seen."""


@dataclass(slots=True)
class TransferStats:
    """Counters of one worker, both roles. Only grow, but for what ``take_reads`` hands over.

    Dictionaries have all their keys from the start: a scrape of metrics walks them.
    """

    bytes_total: int = 0
    """Of completed reads."""
    descriptors_total: int = 0
    reads_posted: int = 0
    reads_completed: int = 0
    reads_failed: int = 0
    reads_cancelled: int = 0
    """Taken back before all of them was posted."""
    deliveries: int = 0
    """Requests whose KV arrived whole."""
    failures: dict[FailureStage, int] = field(default_factory=_zeros(FailureStage))
    """Requests that ended without their KV, by ``FailureStage``."""
    stale: dict[StaleKind, int] = field(default_factory=_zeros(StaleKind))
    """Messages and outcomes that were dropped: of an old attempt, incarnation or read, or twice."""
    lease_events: dict[LeaseEvent, int] = field(default_factory=_zeros(LeaseEvent))
    """By ``LeaseEvent``."""
    rollbacks: int = 0
    checksum_failures: int = 0
    """Reads that brought other bytes than the source has promised."""
    read_timeouts: int = 0
    quarantine_alarms: int = 0
    """Endpoints torn down because too many blocks were in quarantine."""
    _reads: list[ReadObservation] = field(default_factory=list[ReadObservation])
    _posts: deque[float] = field(default_factory=lambda: deque[float](maxlen=MAX_POSTS))

    def observe_post(self, seconds: float) -> None:
        """Posting a part of a read took the loop so long."""
        self._posts.append(seconds)

    def observe_read(self, read: ReadObservation) -> None:
        """Count a completed read."""
        self.reads_completed += 1
        self.bytes_total += read.nbytes
        self.descriptors_total += read.num_descriptors
        self._reads.append(read)

    def take_posts(self) -> list[float]:
        """Return the durations of posts since the last call, the newest ``MAX_POSTS``."""
        posts = list(self._posts)
        self._posts.clear()
        return posts

    def take_reads(self) -> list[ReadObservation]:
        """Return the reads completed since the last call."""
        reads, self._reads = self._reads, []
        return reads
