"""Block managers, alone and under tiers, that are validated at the end of every test."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from blockmgr.block_manager import BlockManager
from core.kv_layout import KVGroup
from tests.blockmgr.tier_world import TierWorld
from tests.blockmgr.words import layout_of

MakeManager = Callable[..., BlockManager]
MakeWorld = Callable[..., TierWorld]


@pytest.fixture
def make_manager() -> Iterator[MakeManager]:
    """Make block managers with fences and prefix caching on; each is validated at the end."""
    made: list[BlockManager] = []

    def make(
        num_blocks: int = 10,
        *groups: KVGroup,
        block_size: int = 16,
        kind: type[BlockManager] = BlockManager,
        **options: Any,
    ) -> BlockManager:
        chosen = {"fences": True, "prefix_caching": True, **options}
        blocks = kind(layout_of(*groups, block_size=block_size), num_blocks, **chosen)
        made.append(blocks)
        return blocks

    yield make
    for blocks in made:
        blocks.check_invariants()


@pytest.fixture
def make_world() -> Iterator[MakeWorld]:
    """Make worlds of ten blocks; each is validated at the end."""
    made: list[TierWorld] = []

    def make(num_blocks: int = 10, *groups: KVGroup, **options: Any) -> TierWorld:
        made.append(TierWorld(num_blocks, *groups, **options))
        return made[-1]

    yield make
    for world in made:
        world.check()
