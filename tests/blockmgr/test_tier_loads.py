"""Nothing that a tier brings back is taken on trust, and nobody waits for it for ever.

The trap: an answer that comes late, matched by anything but its operation, frees or fills what
belongs to somebody else by now.
"""

import pytest

from blockmgr.states import BlockState
from core.errors import InvalidTransitionError, OutOfBlocksError
from core.kv_layout import KVGroup
from core.tiers import CopyIn, Find, Read
from tests.blockmgr.conftest import MakeWorld
from tests.blockmgr.tier_words import pending, tokens
from tests.blockmgr.tier_world import SIZE
from tests.blockmgr.words import ids_of, owner_of, run_of


def test_e11_a_load_that_ends_for_an_owner_that_came_back_settles_nothing(
    make_world: MakeWorld,
) -> None:
    world = make_world(12, num_slots=64)
    world.serve("A", tokens(0, 3))
    world.perform_all()
    world.serve("flush", tokens(900, 11))
    world.perform_all()

    # Given an owner that is released while it is loaded, and admitted again under its own name
    first = world.admit("B", tokens(0, 3))
    assert first is not None
    loading = pending(world, CopyIn)[0].block_ids
    world.finish("B")
    assert {world.blocks.state(block_id) for block_id in loading} == {BlockState.QUARANTINED}
    second = world.admit("B", tokens(0, 3))
    assert second is not None
    assert second != first
    assert not set(loading) & set(ids_of(world.blocks, owner_of("B")))

    # When the first load ends
    world.perform(first)

    # Then it names its own operation, and the new life is still RECEIVING
    (ended,) = world.tiers.take_ended_loads()
    assert ended.operation == first
    assert world.count(BlockState.RECEIVING) == 3
    with pytest.raises(InvalidTransitionError):
        world.blocks.settle(owner_of("B"), 3 * SIZE)
    world.perform(second)
    world.take_loads()


def test_b05_b06_blocks_that_a_load_fills_are_never_cleared(make_world: MakeWorld) -> None:
    # Given zeroing, and a load into two of three blocks
    world = make_world(8, zero_on_allocate=True)
    world.serve("A", tokens(0, 2))
    world.perform_all()
    world.serve("flush", tokens(900, 7))
    world.perform_all()
    load = world.admit("B", tokens(0, 2))
    assert load is not None
    (copy,) = pending(world, CopyIn)
    (computed,) = set(ids_of(world.blocks, owner_of("B"))) - set(copy.block_ids)

    # When a step is dispatched for another owner, while the load writes and after it
    world.blocks.admit(owner_of("D"), tokens=None, num_cached_tokens=0, num_tokens=1)
    step = world.blocks.dispatch_step([owner_of("D")])
    cleared = set(world.blocks.take_zero_list())
    assert cleared == {computed, *ids_of(world.blocks, owner_of("D"))}
    world.perform(load)
    world.take_loads()
    later = world.blocks.dispatch_step([owner_of("B")])

    # Then only what is computed is cleared
    assert world.blocks.take_zero_list() == ()
    for each in (step, later):
        world.blocks.complete_step(each)
    world.blocks.release(owner_of("D"))


def test_b13_nothing_of_a_load_that_failed_or_was_aborted_can_be_hit(
    make_world: MakeWorld,
) -> None:
    world = make_world(10)
    world.serve("A", tokens(0, 3))
    world.perform_all()
    world.serve("flush", tokens(900, 9))
    world.perform_all()

    # Given one load that fails and one whose owner leaves
    failing = world.admit("B", tokens(0, 3))
    assert failing is not None
    world.perform(failing, failed=True)
    world.take_loads()
    aborted = world.admit("C", tokens(0, 3))
    assert aborted is not None
    world.finish("C")
    world.perform(aborted)
    world.take_loads()

    # Then the pool has no hit, and all of its blocks
    assert world.blocks.count_cached_tokens(run_of(tokens(0, 3), SIZE)) == 0
    assert world.blocks.num_allocatable == 10
    # But host memory still has, for a third try
    third = world.admit("D", tokens(0, 3))
    assert third is not None
    world.perform(third)
    world.take_loads()


def test_c17_an_owner_that_loads_has_all_its_blocks_or_none(make_world: MakeWorld) -> None:
    """Two owners, each loading a part and waiting for the rest, would wait for ever."""
    world = make_world(7)
    world.serve("A", tokens(0, 3))
    world.perform_all()
    world.serve("B", tokens(100, 3))
    world.perform_all()
    world.serve("flush", tokens(900, 6))
    world.perform_all()

    # Given one that needs four blocks, three of them loaded
    load = world.admit("C", tokens(0, 3))
    assert load is not None
    assert world.blocks.num_allocatable == 3

    # When another one that needs four comes
    before = world.blocks.counts()
    with pytest.raises(OutOfBlocksError):
        world.admit("D", tokens(100, 3))

    # Then it has taken nothing, and comes in when the first is gone
    assert world.blocks.counts() == before
    assert not world.pending.keys() - {load}
    world.perform(load)
    world.take_loads()
    world.compute("C")
    world.finish("C")
    world.perform_all()
    again = world.admit("D", tokens(100, 3))
    assert again is not None
    world.perform(again)
    world.take_loads()


def test_f05_a_refused_load_leaves_the_next_try_as_the_first(make_world: MakeWorld) -> None:
    world = make_world(6)
    world.serve("A", tokens(0, 3))
    world.perform_all()
    world.serve("flush", tokens(900, 5))
    world.perform_all()
    world.admit("big", tokens(500, 4))
    slots = world.book.host.num_pinned

    for _ in range(3):
        with pytest.raises(OutOfBlocksError):
            world.admit("B", tokens(0, 3))
    assert world.book.host.num_pinned == slots
    assert not world.blocks.holds(owner_of("B"))
    world.finish("big")
    world.perform_all()
    load = world.admit("B", tokens(0, 3))
    assert load is not None
    world.perform(load)
    assert world.take_loads()[0].num_tokens == 3 * SIZE


def test_what_storage_has_comes_back_through_host_memory(make_world: MakeWorld) -> None:
    world = make_world(10, max_staged=8)
    world.serve("A", tokens(0, 3))
    world.perform_all()
    kept = dict(world.storage)

    # Given a new worker with the same storage
    other = make_world(10, max_staged=8)
    other.storage.update(kept)
    owner = owner_of("B")
    other.tiers.fetch(owner, run_of(tokens(0, 3), SIZE), 3 * SIZE)
    other.collect()
    assert other.tiers.is_fetching(owner)
    assert [type(action) for action in other.pending.values()] == [Find]
    other.perform_all()

    # Then it does not wait any more, and loads what it can
    assert not other.tiers.is_fetching(owner)
    load = other.admit("B", tokens(0, 3))
    assert load is not None
    other.perform(load)
    other.take_loads()
    assert other.book.stats.hit_tokens == {"storage": 3 * SIZE, "host": 0}


def test_two_that_want_one_prefix_wait_for_one_fetch(make_world: MakeWorld) -> None:
    world = make_world(10, max_staged=8)
    run = run_of(tokens(0, 3), SIZE)
    for name in "AB":
        world.tiers.fetch(owner_of(name), run, 3 * SIZE)
    world.collect()
    assert len(world.pending) == 1

    # When one leaves, the other still waits; the answer ends it
    world.tiers.forget(owner_of("A"))
    assert world.tiers.is_fetching(owner_of("B"))
    world.perform_all()
    assert not world.tiers.is_fetching(owner_of("B"))


def test_a_fetched_block_that_cannot_be_trusted_is_not_in_the_tier(make_world: MakeWorld) -> None:
    world = make_world(10, max_staged=8)
    run = run_of(tokens(0, 3), SIZE)
    names = [world.book.name(0, digest) for digest in run.digests(3)]
    world.tiers.fetch(owner_of("A"), run, 3 * SIZE)
    world.collect()
    (find,) = world.pending
    world.tiers.found(find, 3)
    (read,) = world.tiers.take_actions()
    assert isinstance(read, Read)

    # Given a second block that was cut off
    world.tiers.read(read.operation, [True, False, True])

    # Then the hit ends in front of it
    assert [world.book.host.has(name) for name in names] == [True, False, True]
    assert world.tiers.count_tokens(run, 0, 3 * SIZE) == SIZE
    assert world.book.host.num_used == 2
    world.pending.clear()


def test_a_window_needs_only_its_own_blocks_from_a_tier(make_world: MakeWorld) -> None:
    # Given a window of two blocks beside full attention
    groups = (KVGroup(layers=(0,)), KVGroup(layers=(1,), window=2 * SIZE))
    world = make_world(20, *groups)
    world.serve("A", tokens(0, 5))
    world.perform_all()
    names = [(name.group, name) for name in world.book.host.names()]
    assert [group for group, _ in names].count(1) == 2
    world.serve("flush", tokens(900, 9))
    world.perform_all()

    # When it is loaded
    load = world.admit("B", tokens(0, 5))
    (copy,) = pending(world, CopyIn)

    # Then the window's blocks come, the others are holes, and the next tokens have room
    assert load is not None
    assert len(copy.block_ids) == 5 + 2
    world.perform(load)
    world.take_loads()
    windowed = world.blocks.block_tables(owner_of("B"))[1]
    assert (windowed >= 0).tolist() == [False] * 3 + [True] * 3


@pytest.mark.parametrize("rest", range(1, SIZE + 1))
def test_a_window_that_moved_on_within_the_last_block_leaves_a_usable_hit(
    rest: int, make_world: MakeWorld
) -> None:
    # Given an owner that ends anywhere in a block, so that its window has left one behind
    groups = (KVGroup(layers=(0,)), KVGroup(layers=(1,), window=2 * SIZE))
    world = make_world(24, *groups)
    run = range(5 * SIZE + rest)
    world.serve("A", run)
    world.perform_all()
    for at in range(3):
        world.serve(f"flush-{at}", tokens(100 * (at + 1), 9))
        world.perform_all()

    # Then what it offered can be loaded
    load = world.admit("B", [*run, 7])
    assert load is not None
    world.perform(load)
    assert world.take_loads()[0].num_tokens == (5 * SIZE + rest) // SIZE * SIZE
