"""What was stored before a reset is never hit after it, in host memory or in storage.

Copies that are under way end after it, and storage is shared by workers that hear of it at
different times, or start later.
"""

from blockmgr.states import BlockState
from core.cache_epoch import epoch_after
from tests.blockmgr.conftest import MakeWorld
from tests.blockmgr.tier_words import tokens
from tests.blockmgr.tier_world import SIZE
from tests.blockmgr.words import owner_of, run_of


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
