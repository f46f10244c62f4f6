"""Block managers that are validated at the end of every test."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from blockmgr.block_manager import BlockManager
from core.kv_layout import KVGroup
from tests.blockmgr.words import layout_of

MakeManager = Callable[..., BlockManager]


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
