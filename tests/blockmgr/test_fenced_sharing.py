"""Sharing while releases wait: a reference that a fence holds is not an owner.

Counting it as one shares what is about to go, evicts in another order, or answers with the content
of a cache that was reset.
"""

import pytest

from blockmgr.receive_target import ReceiveTarget
from blockmgr.states import BlockState
from core.ids import OperationId
from core.kv_layout import KVGroup
from tests.blockmgr.conftest import MakeManager
from tests.blockmgr.words import (
    admit_new,
    admit_with_hit,
    ids_of,
    num_free,
    owner_of,
    run_of,
    take_one,
)

PROMPT = range(33)


def test_a18_reset_with_fences_pending_reports_pending(make_manager: MakeManager) -> None:
    # Given a cached prefix, and its owner preempted for the reset with a step in flight
    blocks = make_manager(10)
    admit_with_hit(blocks, "R", PROMPT)
    owner = owner_of("R")
    blocks.settle(owner, 33)
    step = blocks.dispatch_step([owner])
    blocks.release(owner)

    # When the cache is reset
    assert blocks.reset_cache() is False

    # Then no old hash can hit, and the next try after the drain succeeds
    assert blocks.count_cached_tokens(run_of(PROMPT)) == 0
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
    blocks.settle(owner_of("R"), 33)

    # Then they cannot be hit; those of a newcomer can
    assert blocks.count_cached_tokens(run_of(PROMPT)) == 0
    admit_with_hit(blocks, "S", PROMPT)
    blocks.settle(owner_of("S"), 33)
    assert blocks.count_cached_tokens(run_of(PROMPT)) == 32


def test_a19_a_shared_block_loses_one_reference(make_manager: MakeManager) -> None:
    # Given A and B that share two blocks
    blocks = make_manager(10)
    admit_with_hit(blocks, "A", PROMPT)
    a, b = owner_of("A"), owner_of("B")
    blocks.settle(a, 33)
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
    blocks.settle(a, 33)
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
        blocks.settle(owner, 32)
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
        blocks.settle(owner_of(f"A{index}"), 20)
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
