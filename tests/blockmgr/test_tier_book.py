"""A release never waits for a tier, and nothing that a tier brings back is taken on trust.

Two traps. A copy that is still reading when its blocks are handed out stores another owner's
bytes under this one's name. And an answer that comes late, matched by anything but its operation,
frees or fills what belongs to somebody else by now.
"""

from collections.abc import Iterator
from typing import Any

import pytest

from blockmgr.states import BlockState
from core.cache_epoch import epoch_after
from core.errors import DoubleReleaseError, InvalidTransitionError, OutOfBlocksError
from core.kv_layout import KVGroup
from core.tiers import CopyIn, CopyOut, Find, Read, Write
from tests.blockmgr.tier_world import SIZE, TierWorld
from tests.blockmgr.words import ids_of, owner_of, run_of

MakeWorld = Any


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


def tokens(first: int, num_blocks: int) -> range:
    """Tokens of so many full blocks, and one more that is always computed."""
    return range(first, first + num_blocks * SIZE + 1)


def pending(world: TierWorld, kind: type) -> list[Any]:
    return [action for action in world.pending.values() if isinstance(action, kind)]


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


def test_e11_an_answer_for_an_earlier_life_of_a_name_touches_no_later_one(
    make_world: MakeWorld,
) -> None:
    # Given a copy under way when everything is forgotten
    world = make_world(10)
    world.serve("A", tokens(0, 2))
    (old,) = world.pending
    world.reset()

    # And the same content computed and stored anew
    world.serve("B", tokens(0, 2))
    new = list(world.pending)[-1]
    assert new != old
    world.perform(new)

    # When the old answer comes
    world.perform(old)

    # Then its slots are free, the new content is there, and a third answer is dropped
    assert [len(world.book.host), world.book.host.num_used] == [2, 2]
    world.tiers.copied_out(old, failed=False)
    assert world.book.stats.stale_answers == 1
    assert world.blocks.stats.double_releases == 0
    assert world.admit("C", tokens(0, 2)) is None  # the pool has it


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
    assert second not in {None, first}
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


def test_b05_b06_blocks_that_a_load_fills_are_never_cleared(make_world: MakeWorld) -> None:
    # Given zeroing, and a load into two of three blocks
    world = make_world(8, zero_on_allocate=True)
    world.serve("A", tokens(0, 2))
    world.perform_all()
    world.serve("flush", tokens(900, 7))
    world.perform_all()
    load = world.admit("B", tokens(0, 2))
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


def test_e18_a_reset_while_copies_run_loses_no_block_and_no_slot(make_world: MakeWorld) -> None:
    # Given a load and a store under way
    world = make_world(10, num_slots=16)
    world.serve("A", tokens(0, 3))
    world.perform_all()
    world.serve("flush", tokens(900, 9))
    world.perform_all()
    load = world.admit("B", tokens(0, 3))
    assert load is not None
    world.serve("C", tokens(500, 2))
    assert len(world.pending) == 2

    # When everything is forgotten, and they end afterwards
    world.reset()
    assert len(world.book.host) == 0
    assert world.book.host.num_used == 5
    world.perform_all()
    world.take_loads()
    world.finish("B")
    world.perform_all()

    # Then every block and every slot is free, exactly
    assert world.count(BlockState.FREE) == 10
    assert world.book.host.num_used == 0
    assert world.admit("D", tokens(0, 3)) is None


def test_a18_after_a_reset_storage_has_nothing_old_for_this_worker_and_later_ones(
    make_world: MakeWorld,
) -> None:
    world = make_world(10, max_staged=8)
    world.serve("A", tokens(0, 3))
    world.perform_all()
    assert len(world.storage) == 3
    world.reset()

    world.tiers.fetch(owner_of("B"), run_of(tokens(0, 3), SIZE), 3 * SIZE)
    world.collect()
    world.perform_all()

    assert world.book.stats.lookups == {"found": 0, "missed": 1, "skipped": 0}
    assert len(world.book.host) == 0

    # And a worker that starts later begins where the reset left off
    world.serve("C", tokens(0, 3))
    world.perform_all()
    for epoch, answer in ((world.epoch, "found"), ("another", "missed")):
        later = make_world(10, max_staged=8)
        later.storage.update(world.storage)
        later.tiers.began(epoch)
        later.tiers.fetch(owner_of("B"), run_of(tokens(0, 3), SIZE), 3 * SIZE)
        later.collect()
        later.perform_all()
        assert later.book.stats.lookups == {"found": 0, "missed": 0, "skipped": 0, answer: 1}


def test_a18_workers_that_were_reset_together_go_on_sharing_what_they_store(
    make_world: MakeWorld,
) -> None:
    worlds = [make_world(10, max_staged=8) for _ in range(2)]
    for world in worlds:
        world.book.choose_epoch(epoch_after("", by="router"))
        world.reset()
        world.collect()
        world.perform_all()
    first, second = worlds
    first.serve("A", tokens(0, 3))
    first.perform_all()

    second.storage.update(first.storage)
    second.tiers.fetch(owner_of("B"), run_of(tokens(0, 3), SIZE), 3 * SIZE)
    second.collect()
    second.perform_all()

    assert second.book.stats.lookups["found"] == 1
    assert first.epoch == second.epoch == first.book.epoch


def test_a18_two_resets_in_flight_end_in_the_newer_one_whichever_comes_first(
    make_world: MakeWorld,
) -> None:
    older, newer = (epoch_after("", by=router) for router in ("router1", "router2"))
    for epochs, answers in (
        ((older, newer), ["done", "done"]),
        ((newer, older), ["done", "failed"]),
    ):
        world = make_world(10, max_staged=8)
        for epoch, answer in zip(epochs, answers, strict=True):
            world.serve(epoch, tokens(0, 3))
            world.perform_all()
            world.book.choose_epoch(epoch)
            world.reset()
            # Nothing in host memory can be hit, whatever storage says
            assert len(world.book.host) == 0
            world.collect()
            world.perform_all()
            assert world.book.storage_reset == answer
        assert world.book.epoch == newer


def test_a18_an_epoch_that_is_told_twice_is_one_reset_of_storage(make_world: MakeWorld) -> None:
    """As by two routers that both find this worker behind."""
    world = make_world(10, max_staged=8)
    for _ in range(2):
        world.book.choose_epoch(epoch_after("", by="router"))
        world.reset()
        assert len(world.book.host) == 0
        world.collect()
        world.perform_all()
        assert world.book.storage_reset == "done"


def test_a18_a_reset_that_storage_did_not_take_is_told_until_it_has(make_world: MakeWorld) -> None:
    world = make_world(10, max_staged=8)
    world.reset()
    world.collect()
    assert world.book.storage_reset == "pending"
    world.perform_all(failed=True)
    assert world.book.storage_reset == "failed"
    world.tiers.marked(world.book.epoch, failed=False)
    assert world.book.storage_reset == "done"

    # An answer about an older one says nothing about the next
    epoch = world.book.epoch
    world.reset()
    world.tiers.marked(epoch, failed=True)
    assert world.book.storage_reset == "pending"


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
