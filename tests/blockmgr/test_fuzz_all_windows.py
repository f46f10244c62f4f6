"""The fuzz of random lives for a model whose layers all have windows: no group has every block."""

import random

import pytest

from core.kv_layout import KVGroup
from tests.blockmgr.random_lives import run
from tests.blockmgr.world import World

ALL_WINDOWS = (
    (KVGroup(layers=(0,), window=3), KVGroup(layers=(1,), window=7)),
    (KVGroup(layers=(0,), window=4, num_sinks=1), KVGroup(layers=(1,), window=3)),
    (KVGroup(layers=(0,), window=5),),
)


@pytest.mark.parametrize("groups", ALL_WINDOWS, ids=("two", "sinks", "one"))
@pytest.mark.parametrize("seed", range(10))
def test_j01_random_lives_where_every_group_has_a_window(
    groups: tuple[KVGroup, ...], seed: int
) -> None:
    run(World(groups=groups), random.Random(seed), num_events=400)
