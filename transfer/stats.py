"""What the transfer counts: monotonic, read by the worker that exports metrics."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

LeaseEvent = Literal[
    "granted", "renewed", "confirmed", "released", "withdrawn", "expired", "voided"
]
FailureStage = Literal["prefill", "post", "read", "lease", "peer", "protocol", "integrity"]


@dataclass(frozen=True, slots=True)
class ReadObservation:
    """One completed read, for histograms."""

    nbytes: int
    num_descriptors: int
    duration_s: float
    """From the decision to read until its outcome was seen."""


@dataclass(slots=True)
class TransferStats:
    """Counters of one worker, both roles. Only grow, but for what ``take_reads`` hands over."""

    bytes_total: int = 0
    """Of completed reads."""
    descriptors_total: int = 0
    reads_posted: int = 0
    reads_completed: int = 0
    reads_failed: int = 0
    deliveries: int = 0
    """Requests whose KV arrived whole."""
    failures: Counter[str] = field(default_factory=Counter[str])
    """Requests that ended without their KV, by ``FailureStage``."""
    stale: Counter[str] = field(default_factory=Counter[str])
    """Messages and outcomes that were dropped: of an old attempt, incarnation or read, or twice."""
    lease_events: Counter[str] = field(default_factory=Counter[str])
    """By ``LeaseEvent``."""
    rollbacks: int = 0
    checksum_failures: int = 0
    """Reads that brought other bytes than the source has promised."""
    read_timeouts: int = 0
    quarantine_alarms: int = 0
    """Endpoints torn down because too many blocks were in quarantine."""
    _reads: list[ReadObservation] = field(default_factory=list[ReadObservation])

    def observe_read(self, read: ReadObservation) -> None:
        """Count a completed read."""
        self.reads_completed += 1
        self.bytes_total += read.nbytes
        self.descriptors_total += read.num_descriptors
        self._reads.append(read)

    def take_reads(self) -> list[ReadObservation]:
        """Return the reads completed since the last call."""
        reads, self._reads = self._reads, []
        return reads
