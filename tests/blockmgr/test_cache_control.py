"""A18: what "done" means while the cache is in use.

The failure guarded against: a reset that is told as done while a block from before it is still
fenced or quarantined, one that raises, and one that under steady load is never done.
"""

from dataclasses import dataclass

import pytest

from blockmgr.block_ages import BlockAges
from blockmgr.block_manager import BlockManager
from blockmgr.cache_control import CacheControl
from blockmgr.states import BlockState
from core.ids import OperationId
from tests.blockmgr.conftest import MakeManager
from tests.blockmgr.words import admit_new, admit_with_hit, ids_of, owner_of, run_of

TOKENS = list(range(48))


@dataclass
class Cache:
    blocks: BlockManager
    control: CacheControl
    now: float = 0.0

    @property
    def reset_state(self) -> str:
        return self.control.state().reset


@pytest.fixture
def cache(make_manager: MakeManager) -> Cache:
    ages = BlockAges(20, clock=lambda: cache.now)
    blocks = make_manager(20, observers=(ages,))
    cache = Cache(blocks, CacheControl(blocks, ages))
    return cache


def serve(cache: Cache, name: str) -> None:
    """One request that is computed, cached and over."""
    cache.now += 1
    owner = admit_new(cache.blocks, name, 48, tokens=TOKENS)
    cache.blocks.settle(owner, 48)
    cache.blocks.release(owner)


def test_a18_an_idle_cache_is_reset_at_once(cache: Cache) -> None:
    serve(cache, "A")
    assert cache.reset_state == "none"
    assert cache.control.state().blocks["cached"] == 3
    cache.control.reset()
    assert cache.reset_state == "done"
    assert cache.control.state().blocks["free"] == 20
    assert cache.blocks.count_cached_tokens(run_of(TOKENS)) == 0


def test_a18_blocks_fenced_and_quarantined_at_the_reset_keep_it_pending(cache: Cache) -> None:
    # Given requests that were preempted while a step and a read of theirs were under way
    fenced, reading = admit_new(cache.blocks, "A", 48), admit_new(cache.blocks, "B", 16)
    step = cache.blocks.dispatch_step([fenced])
    operation = OperationId(1)
    cache.blocks.begin_operation(reading, ids_of(cache.blocks, reading), operation)
    cache.blocks.release(fenced)
    cache.blocks.release(reading)

    # When the cache is reset, it is pending until both are over
    cache.control.reset()
    assert cache.reset_state == "pending"
    cache.blocks.complete_step(step)
    assert cache.reset_state == "pending"
    cache.blocks.end_operation(operation)
    assert cache.reset_state == "done"


def test_a18_what_runs_at_the_reset_keeps_it_pending_and_is_not_shared_after_it(
    cache: Cache,
) -> None:
    owner = admit_new(cache.blocks, "A", 48, tokens=TOKENS)
    cache.control.reset()
    cache.blocks.settle(owner, 48)
    assert cache.reset_state == "pending"
    assert cache.blocks.count_cached_tokens(run_of(TOKENS)) == 0
    cache.blocks.release(owner)
    assert cache.reset_state == "done"


def test_a18_newer_requests_do_not_keep_a_reset_pending(cache: Cache) -> None:
    old = admit_new(cache.blocks, "old", 48)
    cache.control.reset()
    for number in range(5):
        serve(cache, f"new{number}")
        running = admit_new(cache.blocks, f"running{number}", 16)
        step = cache.blocks.dispatch_step([running])
        cache.blocks.release(running)
        assert cache.blocks.num_withheld == 1
        if number == 3:
            cache.blocks.release(old)
        assert cache.reset_state == ("done" if number >= 3 else "pending")
        cache.blocks.complete_step(step)
    # And their prefixes are hit
    assert admit_with_hit(cache.blocks, "hit", [*TOKENS, 7]) == 48


def test_a18_a_second_reset_counts_anew(cache: Cache) -> None:
    cache.control.reset()
    assert cache.reset_state == "done"
    cache.now += 1
    admit_new(cache.blocks, "A", 16)
    assert cache.reset_state == "done"
    cache.control.reset()
    assert (cache.reset_state, cache.control.state().resets) == ("pending", 2)
    cache.blocks.release(owner_of("A"))
    assert cache.reset_state == "done"


def test_the_state_adds_up(cache: Cache) -> None:
    serve(cache, "A")
    assert admit_with_hit(cache.blocks, "B", [*TOKENS, 7]) == 48
    state = cache.control.state()
    assert sum(state.blocks.values()) == 20
    assert set(state.blocks) == {kind.name.lower() for kind in BlockState}
    assert (state.query_tokens, state.hit_tokens, state.evictions) == (96, 48, 0)
    assert [(use.tier, use.blocks, use.hit_tokens) for use in state.tiers] == [("device", 0, 48)]
