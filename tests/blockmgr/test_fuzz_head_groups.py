"""The fuzz of random lives for layers whose heads see different tokens: groups of equal spans."""

import random

import pytest

from core.kv_layout import HeadWindow, KVGroup, LayerSpec, group_layers
from tests.blockmgr.random_lives import run
from tests.blockmgr.world import World


def groups_of(num_kv_heads: int, *heads: int, window: int, num_sinks: int) -> tuple[KVGroup, ...]:
    special = HeadWindow(heads=heads, window=window, num_sinks=num_sinks)
    layers = [LayerSpec(num_kv_heads, 8, head_window=special)] * 2
    return group_layers(layers, block_size=2, dtype="float32").groups


HEADS = (
    groups_of(3, 0, 2, window=3, num_sinks=1),
    groups_of(4, 0, 1, window=5, num_sinks=0),
    groups_of(4, 1, 2, 3, window=4, num_sinks=3),
)


@pytest.mark.parametrize("groups", HEADS, ids=("two-of-three", "half", "three-of-four"))
@pytest.mark.parametrize("seed", range(6))
def test_j01_random_lives_where_heads_have_windows(groups: tuple[KVGroup, ...], seed: int) -> None:
    run(World(groups=groups), random.Random(seed), num_events=400)
