"""Short words for what the tests of the tiers do."""

from typing import Any

from tests.blockmgr.tier_world import SIZE, TierWorld


def tokens(first: int, num_blocks: int) -> range:
    """Tokens of so many full blocks, and one more that is always computed."""
    return range(first, first + num_blocks * SIZE + 1)


def pending(world: TierWorld, kind: type) -> list[Any]:
    return [action for action in world.pending.values() if isinstance(action, kind)]
