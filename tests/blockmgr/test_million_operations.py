"""A million random operations against the byte oracle: what a few thousand do not reach.

Long lives wrap the free queue many times, split and regrow the same nodes, and let every counter
meet every other. The events are those of ``World`` and of the tiers' ``Lives``; each is checked
against the bytes, and every few the books are checked against a recount.
"""

import random
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest

from core.kv_layout import KVGroup
from tests.blockmgr.random_lives import run
from tests.blockmgr.tier_lives import live
from tests.blockmgr.world import GROUPS, World

NUM_WORLDS = 400
NUM_EVENTS = 2_000
NUM_TIER_LIVES = 50
NUM_TIER_EVENTS = 4_000
LAYOUTS = ((KVGroup(layers=(0,)),), GROUPS, (KVGroup(layers=(0,), window=3),))


def one_world(seed: int) -> int:
    world = World(groups=LAYOUTS[seed % len(LAYOUTS)])
    run(world, random.Random(seed), NUM_EVENTS, recount_every=4)
    return NUM_EVENTS


def one_life_over_tiers(seed: int) -> int:
    live(seed, NUM_TIER_EVENTS)
    return NUM_TIER_EVENTS


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_j01_a_million_operations_keep_every_promise() -> None:
    # Two processes: the machines that run this have two cores
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as processes:
        worlds = processes.map(one_world, range(1_000, 1_000 + NUM_WORLDS), chunksize=10)
        tiers = processes.map(one_life_over_tiers, range(NUM_TIER_LIVES), chunksize=5)
        assert sum(worlds) + sum(tiers) >= 1_000_000
