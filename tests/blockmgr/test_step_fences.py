"""A released block must not be handed out while a step in flight may still touch it.

With overlap, step N+1 is on the device before the output of step N tells that a request has ended.
If its blocks were free at once, the late step would write over what a read from a prefill worker
has put there since: wrong tokens, and no error. Each test below is one way into that race.
"""

import pytest

from blockmgr.block_manager import BlockManager, ReceiveTarget
from blockmgr.fences import KVWriters, fences_needed
from blockmgr.readings import BlockWaits
from blockmgr.states import BlockState
from core.errors import DoubleReleaseError, InvalidTransitionError, OutOfBlocksError
from core.ids import OperationId, StepSeq
from core.kv_layout import KVGroup
from tests.blockmgr.conftest import MakeManager
from tests.blockmgr.words import (
    admit_new,
    admit_with_hit,
    hashes_of,
    ids_of,
    num_free,
    owner_of,
    take_one,
)

PROMPT = range(33)


def test_a01_stop_while_the_next_step_is_in_flight(make_manager: MakeManager) -> None:
    # Given a request of 3 blocks with its prefill and a decode step dispatched
    blocks = make_manager(10)
    owner = admit_new(blocks, "R", 33)
    prefill, decode = blocks.dispatch_step([owner]), blocks.dispatch_step([owner])

    # When the first step's output stops it
    blocks.complete_step(prefill)
    blocks.release(owner)

    # Then it is gone from all tables, and its blocks wait for the second step
    assert not blocks.holds(owner)
    assert (blocks.num_deferred, num_free(blocks)) == (1, 7)
    blocks.complete_step(decode)
    assert (blocks.num_deferred, num_free(blocks)) == (0, 10)


def test_a02_nothing_in_flight_frees_at_once(make_manager: MakeManager) -> None:
    blocks = make_manager(10)
    owner = admit_new(blocks, "R", 33)
    blocks.complete_step(blocks.dispatch_step([owner]))

    blocks.release(owner)

    assert num_free(blocks) == 10
    assert blocks.stats.deferred_releases == 0


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_a03_depth_three_waits_for_all_steps_in_any_order(
    make_manager: MakeManager, order: tuple[int, int, int]
) -> None:
    blocks = make_manager(10)
    owner = admit_new(blocks, "R", 33)
    steps = [blocks.dispatch_step([owner]) for _ in range(3)]
    blocks.release(owner)

    for index in order[:2]:
        blocks.complete_step(steps[index])
        assert num_free(blocks) == 7
    blocks.complete_step(steps[order[2]])

    assert num_free(blocks) == 10


def test_a04_abort_of_a_partial_prefill_waits_for_its_chunk(make_manager: MakeManager) -> None:
    # Given one chunk of 16 tokens in flight; no token will be sampled
    blocks = make_manager(10)
    owner = admit_new(blocks, "R", 16)
    chunk = blocks.dispatch_step([owner])

    blocks.release(owner)

    assert num_free(blocks) == 9
    blocks.complete_step(chunk)
    assert num_free(blocks) == 10


def test_a05_a_step_without_the_request_does_not_fence_it(make_manager: MakeManager) -> None:
    # Given SHORT in the first step only, LONG in both
    blocks = make_manager(10)
    short, long = admit_new(blocks, "SHORT", 33), admit_new(blocks, "LONG", 33)
    both = blocks.dispatch_step([short, long])
    blocks.dispatch_step([long])

    # When the first step ends SHORT
    blocks.complete_step(both)
    blocks.release(short)

    # Then its blocks are free although the second step is in flight
    assert (num_free(blocks), blocks.num_deferred) == (7, 0)


def test_a06_the_fence_is_the_last_step_that_contained_the_request(
    make_manager: MakeManager,
) -> None:
    # Given a full prefill of R in flight, and a later step without it
    blocks = make_manager(10)
    owner, other = admit_new(blocks, "R", 33), admit_new(blocks, "S", 16)
    prefill = blocks.dispatch_step([owner])
    later = blocks.dispatch_step([other])

    blocks.release(owner)

    # Then the later step's completion frees nothing: newest seen is not the fence
    blocks.complete_step(later)
    assert num_free(blocks) == 6
    blocks.complete_step(prefill)
    assert num_free(blocks) == 9


def test_a08_abort_before_allocation_leaves_no_entry(make_manager: MakeManager) -> None:
    # Given a queued request without blocks, and one that was admitted with none
    blocks = make_manager(10)
    owner, other = admit_new(blocks, "R", 0), admit_new(blocks, "S", 1)
    step = blocks.dispatch_step([owner, other])

    blocks.release(owner)

    assert not blocks.holds(owner_of("queued"))
    assert blocks.num_deferred == 0
    blocks.complete_step(step)


def test_a09_several_requests_wait_behind_one_step(make_manager: MakeManager) -> None:
    blocks = make_manager(10)
    first, second = admit_new(blocks, "R", 33), admit_new(blocks, "S", 33)
    prefill = blocks.dispatch_step([first, second])
    decode = blocks.dispatch_step([first, second])
    blocks.complete_step(prefill)

    blocks.release(first)
    blocks.release(second)

    assert (blocks.num_deferred, num_free(blocks)) == (2, 4)
    blocks.complete_step(decode)
    assert (blocks.num_deferred, num_free(blocks)) == (0, 10)


def test_a10_preempted_and_admitted_again_while_in_flight(make_manager: MakeManager) -> None:
    # Given a request preempted with two steps in flight
    blocks = make_manager(10)
    owner = admit_new(blocks, "R", 33)
    withheld = set(ids_of(blocks, owner))
    steps = [blocks.dispatch_step([owner]) for _ in range(2)]
    blocks.release(owner)

    # When the same owner is admitted again before they complete
    blocks.admit(owner, hashes=hashes_of(PROMPT), num_cached_tokens=0, num_tokens=33)

    # Then its blocks are others, and the old steps do not touch its new life
    assert withheld.isdisjoint(ids_of(blocks, owner))
    for step in steps:
        blocks.complete_step(step)
        assert len(ids_of(blocks, owner)) == 3
    assert num_free(blocks) == 7
    assert not blocks.is_in_flight(owner)
    blocks.release(owner)
    assert num_free(blocks) == 10


def test_a12_an_empty_step_has_no_number(make_manager: MakeManager) -> None:
    blocks = make_manager(10)
    owner = admit_new(blocks, "R", 33)
    first = blocks.dispatch_step([owner])

    # When a step without requests comes between
    with pytest.raises(InvalidTransitionError):
        blocks.dispatch_step([])
    blocks.release(owner)

    # Then it fences nothing, and the next step has the next number
    blocks.complete_step(first)
    assert num_free(blocks) == 10
    assert blocks.dispatch_step([admit_new(blocks, "S", 1)]) == first + 1


def test_a13_a_step_that_dies_is_retired_once(make_manager: MakeManager) -> None:
    blocks = make_manager(10)
    owner = admit_new(blocks, "R", 33)
    step = blocks.dispatch_step([owner])
    blocks.release(owner)
    assert num_free(blocks) == 7

    # When the device has been drained after the step raised
    blocks.fail_step(step)

    assert num_free(blocks) == 10
    assert blocks.stats.failed_steps == 1
    with pytest.raises(DoubleReleaseError):
        blocks.complete_step(step)


def test_a15_a_victim_in_flight_offers_nothing(make_manager: MakeManager) -> None:
    # Given a full pool whose owners are all in a step
    blocks = make_manager(6)
    owners = [admit_new(blocks, "R", 48), admit_new(blocks, "S", 48)]
    step = blocks.dispatch_step(owners)

    # When a scheduler looks for a victim after a failed allocation
    with pytest.raises(OutOfBlocksError):
        admit_new(blocks, "X", 1)

    # Then none would help now, and one is enough once the step is complete
    assert [blocks.count_reclaimable(owner) for owner in owners] == [0, 0]
    blocks.complete_step(step)
    assert [blocks.count_reclaimable(owner) for owner in owners] == [3, 3]
    blocks.release(owners[1])
    admit_new(blocks, "X", 1)


def test_a16_an_idle_pool_drains_by_completions_alone(make_manager: MakeManager) -> None:
    # Given every block fenced or quarantined
    blocks = make_manager(6)
    first, second = admit_new(blocks, "R", 48), admit_new(blocks, "S", 48)
    step = blocks.dispatch_step([first])
    blocks.begin_operation(second, ids_of(blocks, second), OperationId(1))
    blocks.release(first)
    blocks.release(second)
    assert (blocks.num_allocatable, blocks.num_withheld) == (0, 6)

    # When completions arrive and no work does
    assert blocks.has_pending
    blocks.complete_step(step)
    blocks.end_operation(OperationId(1))

    # Then the waiting request fits
    assert not blocks.has_pending
    admit_new(blocks, "X", 96)


@pytest.mark.parametrize(
    ("depth", "writers", "has_loading_tier", "needed"),
    [
        (1, KVWriters.NONE, False, False),
        (1, KVWriters.CONSUMER, False, False),
        (1, KVWriters.BOTH, True, False),
        (2, KVWriters.NONE, False, False),
        (2, KVWriters.NONE, True, True),
        (2, KVWriters.PRODUCER, False, False),
        (2, KVWriters.PRODUCER, True, True),
        (2, KVWriters.CONSUMER, False, True),
        (2, KVWriters.BOTH, False, True),
        (4, KVWriters.CONSUMER, True, True),
    ],
)
def test_a17_truth_table(
    depth: int, writers: KVWriters, *, has_loading_tier: bool, needed: bool
) -> None:
    assert fences_needed(depth, writers, has_loading_tier=has_loading_tier) is needed


def test_a17_without_fences_blocks_move_as_if_nothing_were_in_flight(
    make_manager: MakeManager,
) -> None:
    def allocated(*, fences: bool, overlap: bool) -> list[list[int]]:
        blocks = make_manager(6, fences=fences)
        tables: list[list[int]] = []
        for index in range(5):
            owner = admit_new(blocks, f"R{index}", 40)
            tables.append(ids_of(blocks, owner))
            step = blocks.dispatch_step([owner])
            if not overlap:
                blocks.complete_step(step)
            blocks.release(owner)
            assert blocks.num_withheld == 0
        return tables

    immediate = allocated(fences=True, overlap=False)
    assert allocated(fences=False, overlap=True) == immediate
    assert allocated(fences=False, overlap=False) == immediate


def test_a17_fences_switch_only_while_no_step_is_in_flight(make_manager: MakeManager) -> None:
    blocks = make_manager(10, fences=False)
    owner = admit_new(blocks, "R", 33)
    step = blocks.dispatch_step([owner])
    with pytest.raises(InvalidTransitionError):
        blocks.switch_fences(enabled=True)

    blocks.complete_step(step)
    blocks.switch_fences(enabled=True)
    step = blocks.dispatch_step([owner])
    blocks.release(owner)

    assert num_free(blocks) == 7
    blocks.complete_step(step)


def test_a18_reset_with_fences_pending_reports_pending(make_manager: MakeManager) -> None:
    # Given a cached prefix, and its owner preempted for the reset with a step in flight
    blocks = make_manager(10)
    admit_with_hit(blocks, "R", PROMPT)
    owner = owner_of("R")
    blocks.settle(owner, 33, hashes_of(PROMPT))
    step = blocks.dispatch_step([owner])
    blocks.release(owner)

    # When the cache is reset
    assert blocks.reset_cache() is False

    # Then no old hash can hit, and the next try after the drain succeeds
    assert blocks.count_cached_tokens(hashes_of(PROMPT)) == 0
    blocks.complete_step(step)
    assert num_free(blocks) == 10
    assert blocks.reset_cache() is True


def test_a18_what_was_computed_before_a_reset_is_not_shared_after(
    make_manager: MakeManager,
) -> None:
    # Given an owner that was admitted before the reset
    blocks = make_manager(10)
    admit_with_hit(blocks, "R", PROMPT)
    assert blocks.reset_cache() is False

    # When its tokens settle after it
    blocks.settle(owner_of("R"), 33, hashes_of(PROMPT))

    # Then they cannot be hit; those of a newcomer can
    assert blocks.count_cached_tokens(hashes_of(PROMPT)) == 0
    admit_with_hit(blocks, "S", PROMPT)
    blocks.settle(owner_of("S"), 33, hashes_of(PROMPT))
    assert blocks.count_cached_tokens(hashes_of(PROMPT)) == 32


def test_a19_a_shared_block_loses_one_reference(make_manager: MakeManager) -> None:
    # Given A and B that share two blocks
    blocks = make_manager(10)
    admit_with_hit(blocks, "A", PROMPT)
    a, b = owner_of("A"), owner_of("B")
    blocks.settle(a, 33, hashes_of(PROMPT))
    assert admit_with_hit(blocks, "B", PROMPT) == 32
    shared = ids_of(blocks, b)[0]
    step = blocks.dispatch_step([a])

    # When A ends with a step in flight and the fence passes
    blocks.release(a)
    assert blocks.state(shared) is BlockState.ACTIVE
    blocks.complete_step(step)

    # Then the block stays B's, whose end lets it go once
    assert blocks.state(shared) is BlockState.ACTIVE
    blocks.release(b)
    assert blocks.state(shared) is BlockState.CACHED
    assert blocks.num_allocatable == 10


def test_a19_the_other_owner_waits_for_the_first_ones_step(make_manager: MakeManager) -> None:
    # Given A gone with a step in flight that reads what it shares with B
    blocks = make_manager(10)
    admit_with_hit(blocks, "A", PROMPT)
    a, b = owner_of("A"), owner_of("B")
    blocks.settle(a, 33, hashes_of(PROMPT))
    admit_with_hit(blocks, "B", PROMPT)
    shared = ids_of(blocks, b)[0]
    step = blocks.dispatch_step([a])
    blocks.release(a)

    # When B, which is in no step, ends too
    blocks.release(b)

    # Then the shared block still waits for A's step
    assert blocks.state(shared) is BlockState.FENCED
    blocks.complete_step(step)
    assert blocks.state(shared) is BlockState.CACHED


@pytest.mark.parametrize("is_cached", [False, True])
@pytest.mark.parametrize("overlap", [False, True])
def test_a21_reuse_order_is_the_same_through_the_fence(
    make_manager: MakeManager, *, overlap: bool, is_cached: bool
) -> None:
    # Given two groups with blocks a0..a2 and s0..s1 that fill the pool
    blocks = make_manager(5, KVGroup(layers=(0,)), KVGroup(layers=(1,), window=64))
    owner = admit_new(blocks, "R", 32)
    blocks.begin_receive(owner, [ReceiveTarget(0, 2, 1)], OperationId(1))
    blocks.end_operation(OperationId(1))
    if is_cached:
        blocks.settle(owner, 32, hashes_of(range(32)))
    a_ids, s_ids = ids_of(blocks, owner, 0), ids_of(blocks, owner, 1)
    step = blocks.dispatch_step([owner])

    # When it is released, at once or through the fence
    if not overlap:
        blocks.complete_step(step)
    blocks.release(owner)
    if overlap:
        blocks.complete_step(step)

    # Then blocks are reused from each group's last to its first
    reused = [take_one(blocks, f"N{index}") for index in range(5)]
    assert reused == [*a_ids[::-1], *s_ids[::-1]]


def test_a23_requests_that_wait_behind_a_fence_share_no_prefix(make_manager: MakeManager) -> None:
    # Given 8 requests with prefix A and 7 with other prefixes
    blocks = make_manager(40)
    for index in range(8):
        admit_with_hit(blocks, f"A{index}", range(20))
        blocks.settle(owner_of(f"A{index}"), 20, hashes_of(range(20)))
    others = [admit_new(blocks, f"B{index}", 20) for index in range(7)]
    same = [owner_of(f"A{index}") for index in range(8)]
    assert blocks.count_common_blocks(same) == 1
    step = blocks.dispatch_step(same)

    # When seven of the first end with a step in flight
    for owner in same[:7]:
        blocks.release(owner)

    # Then the survivors, with eight distinct first blocks, have none in common
    assert blocks.count_common_blocks([same[7], *others]) == 0
    blocks.complete_step(step)


@pytest.mark.parametrize("step_first", [False, True])
def test_a24_a_block_waits_for_step_and_operation_in_either_order(
    make_manager: MakeManager, *, step_first: bool
) -> None:
    # Given a released block that a step and an operation may touch
    blocks = make_manager(1)
    owner = admit_new(blocks, "R", 1)
    (block,) = ids_of(blocks, owner)
    step = blocks.dispatch_step([owner])
    blocks.begin_operation(owner, [block], OperationId(1))
    blocks.release(owner)
    assert blocks.waits_of(block) == BlockWaits(releases=1, operations=1)
    assert blocks.state(block) is BlockState.FENCED

    # When one of them ends, then what is left is visible, and the block is not free
    if step_first:
        blocks.complete_step(step)
        assert blocks.waits_of(block) == BlockWaits(releases=0, operations=1)
        assert blocks.state(block) is BlockState.QUARANTINED
        blocks.end_operation(OperationId(1))
    else:
        blocks.end_operation(OperationId(1))
        assert blocks.waits_of(block) == BlockWaits(releases=1, operations=0)
        assert blocks.state(block) is BlockState.FENCED
        blocks.complete_step(step)

    assert blocks.state(block) is BlockState.FREE


def test_steps_that_were_never_dispatched_are_refused(make_manager: MakeManager) -> None:
    blocks = make_manager(1)
    with pytest.raises(InvalidTransitionError):
        blocks.complete_step(StepSeq(1))
    with pytest.raises(InvalidTransitionError):
        blocks.dispatch_step([owner_of("nobody")])


class FenceByNewestSeen(BlockManager):
    """The guard switched off: a completed step counts for every earlier one."""

    def complete_step(self, step: StepSeq) -> None:
        for earlier in range(1, step + 1):
            if self._steps.is_in_flight(StepSeq(earlier)):
                super().complete_step(StepSeq(earlier))


def test_a06_fails_where_the_newest_step_seen_is_the_fence(make_manager: MakeManager) -> None:
    blocks = make_manager(10, kind=FenceByNewestSeen)
    owner, other = admit_new(blocks, "R", 33), admit_new(blocks, "S", 16)
    blocks.dispatch_step([owner])
    later = blocks.dispatch_step([other])
    blocks.release(owner)

    blocks.complete_step(later)

    assert num_free(blocks) == 9, "R's blocks are free while its own step is in flight"


def test_a01_fails_without_the_fence(make_manager: MakeManager) -> None:
    blocks = make_manager(10, fences=False)
    owner = admit_new(blocks, "R", 33)
    blocks.complete_step(blocks.dispatch_step([owner]))
    blocks.dispatch_step([owner])

    blocks.release(owner)

    assert num_free(blocks) == 10, "R's blocks are free while a step of its is in flight"
