"""A model whose every layer has the same window has one group, and holes in it.

The failure guarded against: an eviction that takes a hole for a block. As an index it names the
last block of the pool, whose content is then given away under its owner.
"""

import random

import pytest

from blockmgr.block_manager import BlockManager
from core.errors import OutOfBlocksError
from core.ids import Owner
from core.kv_layout import KVGroup
from tests.blockmgr.words import layout_of, owner_of, run_of

BLOCK_SIZE = 2
GROUP = KVGroup(layers=(0,), window=3)


@pytest.mark.parametrize("seed", range(40))
def test_a_small_pool_of_one_window_serves_many_prompts(seed: int) -> None:
    draw = random.Random(seed)
    layout = layout_of(GROUP, block_size=BLOCK_SIZE)
    blocks = BlockManager(layout, 14, fences=True, prefix_caching=True)
    live: list[Owner] = []
    for number in range(200):
        if live and draw.random() < 0.5:
            blocks.release(live.pop(draw.randrange(len(live))))
        else:
            shared = [draw.randrange(2)] * draw.randrange(2, 12)
            tokens = shared + [9] * draw.randrange(1, 8)
            owner, run = owner_of(f"R{number}"), run_of(tokens, BLOCK_SIZE)
            cached = blocks.count_cached_tokens(run, len(tokens) - 1)
            try:
                blocks.admit(owner, tokens=run, num_cached_tokens=cached, num_tokens=len(tokens))
            except OutOfBlocksError:
                continue
            live.append(owner)
            blocks.settle(owner, len(tokens))
        blocks.check_invariants()
