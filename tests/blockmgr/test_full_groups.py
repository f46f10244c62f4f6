"""Full layers in several groups, beside a window or without any: a hit is a hit of each group."""

import random

import pytest

from core.kv_layout import KVGroup, LayerSpec, group_layers
from tests.blockmgr.conftest import MakeManager
from tests.blockmgr.random_lives import run
from tests.blockmgr.words import admit_with_hit, ids_of, owner_of
from tests.blockmgr.world import World

SPLIT = (KVGroup(layers=(0, 1)), KVGroup(layers=(2, 3)))
"""Full layers in two groups."""
SINKS = group_layers(
    [LayerSpec(1, 8), LayerSpec(1, 8, num_sinks=4)], block_size=2, dtype="float32"
).groups
MIXED = group_layers(
    [LayerSpec(1, 8), LayerSpec(1, 8), LayerSpec(1, 8, window=4)], block_size=2, dtype="float32"
).groups
"""Twice as many full layers as there are with a window: two groups of them."""
THREE = (*SPLIT, KVGroup(layers=(4, 5), num_sinks=1))


@pytest.mark.parametrize("groups", [SPLIT, SINKS, THREE], ids=("split", "sinks", "three"))
def test_a_hit_has_the_blocks_of_every_group(
    make_manager: MakeManager, groups: tuple[KVGroup, ...]
) -> None:
    # Given a prompt that has settled
    blocks = make_manager(40, *groups)
    admit_with_hit(blocks, "R", range(40))
    blocks.settle(owner_of("R"), 40)

    # When another one begins with it, then each group shares its own two full blocks
    assert admit_with_hit(blocks, "S", range(40)) == 32
    shared = [ids_of(blocks, owner_of("S"), at)[:2] for at in range(len(groups))]
    assert shared == [ids_of(blocks, owner_of("R"), at)[:2] for at in range(len(groups))]
    assert len({block_id for group in shared for block_id in group}) == 2 * len(groups)


@pytest.mark.parametrize(
    "groups", [SPLIT, SINKS, MIXED, THREE], ids=("split", "sinks", "mixed", "three")
)
@pytest.mark.parametrize("seed", range(4))
def test_random_lives_where_full_layers_are_several_groups(
    groups: tuple[KVGroup, ...], seed: int
) -> None:
    run(World(groups=groups), random.Random(seed), num_events=400)
