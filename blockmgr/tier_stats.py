"""What happened to blocks below the pool, since the start."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias, TypeVar, get_args

from core.tiers import Tier

Move: TypeAlias = Literal["done", "failed", "skipped"]
"""What became of a block; ``skipped``: over a bound, so never begun."""
LookUp: TypeAlias = Literal["found", "missed", "skipped"]
"""What became of a request that storage was to be asked for."""
MOVES: Final[tuple[Move, ...]] = get_args(Move)
LOOK_UPS: Final[tuple[LookUp, ...]] = get_args(LookUp)
LOWER_TIERS: Final = (Tier.HOST, Tier.STORAGE)
Key = TypeVar("Key", bound=str)


def _zeros(keys: tuple[Key, ...]) -> Callable[[], dict[Key, int]]:
    return lambda: dict.fromkeys(keys, 0)


@dataclass(slots=True)
class TierStats:
    """Counts that only grow, and never get another key: a scrape of metrics walks them."""

    stores: dict[Move, int] = field(default_factory=_zeros(MOVES))
    """Blocks, pool to host memory."""
    loads: dict[Move, int] = field(default_factory=_zeros(MOVES))
    """Blocks, host memory to pool; none is skipped."""
    writes: dict[Move, int] = field(default_factory=_zeros(MOVES))
    """Blocks, host memory to storage."""
    reads: dict[Move, int] = field(default_factory=_zeros(MOVES))
    """Blocks, storage to host memory."""
    lookups: dict[LookUp, int] = field(default_factory=_zeros(LOOK_UPS))
    """Requests that storage was asked for, and those that it was not."""
    hit_tokens: dict[Tier, int] = field(default_factory=_zeros(LOWER_TIERS))
    """Tokens that need no computing, by the tier that had them."""
    stale_answers: int = 0
    """Answers to operations that are not pending: dropped."""
