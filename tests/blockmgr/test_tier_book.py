"""A release never waits for a tier, and what is being stored is kept until that has ended.

The trap: a copy that is still reading when its blocks are handed out stores another owner's bytes
under this one's name.
"""

import pytest

from blockmgr.states import BlockState
from core.errors import DoubleReleaseError, OutOfBlocksError
from core.tiers import CopyOut, Write
from tests.blockmgr.conftest import MakeWorld
from tests.blockmgr.tier_words import pending, tokens
from tests.blockmgr.tier_world import SIZE
from tests.blockmgr.words import ids_of, owner_of, run_of


def test_e14_one_copy_that_fails_of_three_releases_all_three_once(make_world: MakeWorld) -> None:
    # Given three owners that finish together, each with a copy under way
    world = make_world(10)
    for at, name in enumerate("ABC"):
        world.admit(name, tokens(100 * at, 2))
        world.compute(name)
    for name in "ABC":
        world.finish(name)
    assert world.blocks.owners == []
    assert world.count(BlockState.QUARANTINED) == 6

    # When the first one's fails
    first, *others = list(world.pending)
    world.perform(first, failed=True)
    for operation in others:
        world.perform(operation)

    # Then every block is back exactly once, and only the failed content is not in the tier
    assert world.blocks.num_allocatable == 10
    assert world.book.stats.stores == {"done": 4, "failed": 2, "skipped": 0}
    assert [len(world.book.host), world.book.host.num_pinned] == [4, 0]
    for name in "ABC":
        with pytest.raises(DoubleReleaseError):
            world.blocks.release(owner_of(name))


def test_e15_a_copy_that_hangs_keeps_its_blocks_and_no_release_waits(make_world: MakeWorld) -> None:
    world = make_world(10)
    for at, name in enumerate("AB"):
        world.admit(name, tokens(100 * at, 2))
        world.compute(name)

    # Given a copy of A that hangs
    world.finish("A")
    (hung,) = world.pending
    kept = pending(world, CopyOut)[0].block_ids

    # When B finishes and its copy ends
    world.finish("B")
    world.perform(list(world.pending)[-1])

    # Then A's blocks alone are QUARANTINED, whatever else is allocated
    assert {world.blocks.state(block_id) for block_id in kept} == {BlockState.QUARANTINED}
    world.admit("C", tokens(500, 7))
    assert not set(kept) & set(ids_of(world.blocks, owner_of("C")))
    with pytest.raises(OutOfBlocksError):
        world.admit("D", tokens(900, 1))

    # Until it ends, late as it may
    world.perform(hung)
    assert world.blocks.num_allocatable == 2


def test_e15_copies_that_hang_keep_a_bounded_part_of_the_pool(make_world: MakeWorld) -> None:
    world = make_world(10, max_copied=3)

    for at, name in enumerate("ABC"):
        world.admit(name, tokens(100 * at, 2))
        world.compute(name)
        world.finish(name)

    assert world.count(BlockState.QUARANTINED) == 3
    assert world.book.num_copied_blocks == 3
    assert world.book.stats.stores["skipped"] == 3
    assert world.blocks.num_allocatable == 7
    world.perform_all()


def test_e16_blocks_of_a_preempted_owner_are_not_reused_while_they_are_stored(
    make_world: MakeWorld,
) -> None:
    # Given a victim whose blocks are being stored
    world = make_world(6)
    world.admit("victim", tokens(0, 4))
    world.compute("victim")
    world.finish("victim")

    # When others want more than what is left
    with pytest.raises(OutOfBlocksError):
        world.admit("other", tokens(900, 2))
    world.perform_all()
    world.admit("other", tokens(900, 5))
    world.compute("other")
    world.finish("other")

    # Then what was stored is the victim's: loading it verifies each block
    world.perform_all()
    load = world.admit("victim", tokens(0, 4), attempt=2)
    assert load is not None
    world.perform(load)
    (ended,) = world.take_loads()
    assert ended.num_tokens == 4 * SIZE


def test_e12_a_hit_during_a_store_keeps_the_block_on_the_device(make_world: MakeWorld) -> None:
    world = make_world(10)
    world.serve("A", tokens(0, 2))
    (copied,) = pending(world, CopyOut)

    # When another owner hits what is being stored
    world.admit("B", tokens(0, 2))

    # Then it has the same blocks, and the end of the copy changes nothing for it
    assert ids_of(world.blocks, owner_of("B"))[:2] == list(copied.block_ids)
    world.perform_all()
    assert world.count(BlockState.ACTIVE) == 3


def test_d18_a_leased_block_is_read_by_a_peer_and_stored_and_free_after_both(
    make_world: MakeWorld,
) -> None:
    for storing_ends_first in (True, False):
        world = make_world(4)
        world.admit("A", tokens(0, 2))
        world.compute("A")

        # Given a lease, under which the blocks are being stored
        world.lease(owner_of("A"))
        (copy,) = world.pending

        # When both end, in either order
        if storing_ends_first:
            world.perform(copy)
            assert world.count(BlockState.LEASED) == 3
            world.blocks.release(owner_of("A"))
        else:
            world.blocks.release(owner_of("A"))
            assert world.count(BlockState.QUARANTINED) == 2
            world.perform(copy)

        # Then the blocks are free, and have been stored once
        world.collect()
        assert not world.pending
        assert world.blocks.num_allocatable == 4


def test_a_storage_that_hangs_holds_host_slots_and_no_block_of_the_pool(
    make_world: MakeWorld,
) -> None:
    world = make_world(10, num_slots=8, max_staged=4)

    # Given writes that never end
    for at in range(4):
        world.serve(f"{at}", tokens(100 * at, 2))
        for operation, action in list(world.pending.items()):
            if isinstance(action, CopyOut):
                world.perform(operation)

    # Then as many blocks as are allowed are on their way, and the pool has all of its own
    assert sum(len(write.slots) for write in pending(world, Write)) == 4
    assert world.book.stats.writes["skipped"] == 4
    assert world.book.num_staged_blocks == 4
    assert world.blocks.num_allocatable == 10
    # And a newcomer is not made to wait for a look-up
    world.tiers.fetch(owner_of("new"), run_of(tokens(900, 3), SIZE), 3 * SIZE)
    assert not world.tiers.is_fetching(owner_of("new"))
    world.perform_all(failed=True)
    assert world.book.num_staged_blocks == 0


def test_the_least_recently_used_content_is_thrown_out_tails_before_heads(
    make_world: MakeWorld,
) -> None:
    world = make_world(20, num_slots=4)
    world.serve("A", tokens(0, 2))
    world.serve("B", tokens(100, 2))
    world.perform_all()

    # Given A used after B, when there is no room for one more
    load = world.tiers.count_tokens(run_of(tokens(0, 2), SIZE), 0, 2 * SIZE)
    assert load == 2 * SIZE
    world.admit("A2", tokens(0, 2))
    world.compute("A2")
    world.finish("A2")
    world.serve("C", tokens(200, 1))
    world.perform_all()

    # Then B's tail is gone, so that its head is still of use
    assert world.tiers.count_tokens(run_of(tokens(100, 2), SIZE), 0, 2 * SIZE) == SIZE
    assert world.tiers.count_tokens(run_of(tokens(0, 2), SIZE), 0, 2 * SIZE) == 2 * SIZE


def test_an_operation_of_a_tier_never_meets_one_of_a_transfer(make_world: MakeWorld) -> None:
    world = make_world(10)
    world.serve("A", tokens(0, 2))
    assert all(operation < 0 for operation in world.pending)
    world.perform_all()
