"""What happened to blocks below the pool, since the start."""

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class TierStats:
    """Blocks by what became of them. ``skipped``: over a bound, so never begun."""

    stores: Counter[str] = field(default_factory=Counter[str])
    """Pool to host memory: ``stored``, ``failed``, ``skipped``."""
    loads: Counter[str] = field(default_factory=Counter[str])
    """Host memory to pool: ``loaded``, ``failed``."""
    writes: Counter[str] = field(default_factory=Counter[str])
    """Host memory to storage: ``written``, ``failed``, ``skipped``."""
    fetches: Counter[str] = field(default_factory=Counter[str])
    """Storage to host memory: ``fetched``, ``failed``, ``skipped``; ``asked`` and ``missed`` count
    requests."""
    hit_tokens: Counter[str] = field(default_factory=Counter[str])
    """Tokens that need no computing, by the tier that had them: ``host``, ``storage``."""
    stale_answers: int = 0
    """Answers to operations that are not pending: dropped."""
