"""What happened to blocks below the pool, since the start."""

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class TierStats:
    """Blocks by result: ``done``, ``failed``, or ``skipped`` (over a bound, so never begun)."""

    stores: Counter[str] = field(default_factory=Counter[str])
    """Pool to host memory."""
    loads: Counter[str] = field(default_factory=Counter[str])
    """Host memory to pool."""
    writes: Counter[str] = field(default_factory=Counter[str])
    """Host memory to storage."""
    reads: Counter[str] = field(default_factory=Counter[str])
    """Storage to host memory."""
    lookups: Counter[str] = field(default_factory=Counter[str])
    """Requests that storage was asked for: ``found``, ``missed``, ``skipped``."""
    hit_tokens: Counter[str] = field(default_factory=Counter[str])
    """Tokens that need no computing, by the tier that had them: ``host``, ``storage``."""
    stale_answers: int = 0
    """Answers to operations that are not pending: dropped."""
