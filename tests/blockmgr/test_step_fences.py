"""A released block must not be handed out while a step in flight may still touch it.

With overlap, step N+1 is on the device before the output of step N tells that a request has ended.
If its blocks were free at once, the late step would write over what a read from a prefill worker
has put there since: wrong tokens, and no error. Each test below is one way into that race.
"""

import pytest

from blockmgr.block_manager import BlockManager
from blockmgr.readings import BlockWaits
from blockmgr.states import BlockState
from core.errors import DoubleReleaseError, InvalidTransitionError, OutOfBlocksError
from core.ids import OperationId, StepSeq
from tests.blockmgr.conftest import MakeManager
from tests.blockmgr.words import (
    admit_new,
    ids_of,
    num_free,
    owner_of,
    run_of,
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
    blocks.admit(owner, tokens=run_of(PROMPT), num_cached_tokens=0, num_tokens=33)

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


@pytest.mark.parametrize("step_first", [False, True])
def test_a24_i2_a_block_waits_for_step_and_operation_in_either_order(
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
