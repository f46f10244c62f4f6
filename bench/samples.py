"""What a load run records: when each request was sent and when each of its tokens arrived."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RequestSample:
    """One request as its client saw it. Times are seconds on one monotonic clock."""

    sent: float
    arrivals: tuple[float, ...]
    """One per stream event that carried output, in order. An event may carry several tokens; its
    time is never spread over them."""
    output_tokens: int
    """As the server counted them; 0 for a request that failed."""
    failure: str | None = None


@dataclass(frozen=True, slots=True)
class LoadRun:
    """One closed loop at one concurrency, ``started`` when the first request was sent."""

    started: float
    ended: float
    samples: Sequence[RequestSample]


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """What every system is asked to do, in the same way."""

    concurrency: tuple[int, ...]
    prompt_tokens: int
    output_tokens: int
    repeats: int
    rounds: int | None = None
    """Requests of each client per repeat; None: 4, fewer where there are many clients."""

    def rounds_at(self, concurrency: int) -> int:
        """Return how many requests each of ``concurrency`` clients sends, one after the other."""
        return self.rounds or max(2, min(4, 64 // concurrency))
