"""A load that brings only a part: tokens count up to the first block that is not here."""

import pytest

from blockmgr.receive_target import ReceiveTarget
from core.errors import InvalidTransitionError
from core.ids import OperationId
from tests.blockmgr.conftest import MakeManager
from tests.blockmgr.words import admit_new, admit_with_hit, ids_of, owner_of, run_of

TOKENS = range(64)
GOOD, BAD = OperationId(1), OperationId(2)


def test_c23_recompute_goes_on_from_the_first_invalid_block(make_manager: MakeManager) -> None:
    # Given a request of four blocks, of which a load brings two, and fails for the third on
    blocks = make_manager(10)
    owner = admit_new(blocks, "R", 0, tokens=TOKENS)
    blocks.begin_receive(owner, [ReceiveTarget(0, 0, 2)], GOOD)
    blocks.begin_receive(owner, [ReceiveTarget(0, 2, 2)], BAD)
    blocks.end_operation(GOOD)
    blocks.end_operation(BAD)
    # When what is known to be good settles
    blocks.settle(owner, 32)
    # Then 32 tokens count, and nothing beyond can be hit
    assert blocks.count_cached_tokens(run_of(TOKENS)) == 32
    # And the rest is computed into the same blocks, and counts when its step has completed
    step = blocks.dispatch_step([owner])
    assert blocks.count_cached_tokens(run_of(TOKENS)) == 32
    blocks.complete_step(step)
    blocks.settle(owner, 64)
    assert blocks.count_cached_tokens(run_of(TOKENS)) == 64


def test_c23_tokens_of_a_load_under_way_cannot_settle(make_manager: MakeManager) -> None:
    blocks = make_manager(10)
    owner = admit_new(blocks, "R", 0, tokens=TOKENS)
    blocks.begin_receive(owner, [ReceiveTarget(0, 0, 2)], GOOD)
    blocks.begin_receive(owner, [ReceiveTarget(0, 2, 2)], BAD)
    blocks.end_operation(GOOD)
    with pytest.raises(InvalidTransitionError):
        blocks.settle(owner, 48)
    blocks.settle(owner, 32)
    blocks.end_operation(BAD)


def test_c23_fail_leaves_no_invalid_block_in_the_cache(make_manager: MakeManager) -> None:
    blocks = make_manager(10)
    owner = admit_new(blocks, "R", 0, tokens=TOKENS)
    blocks.begin_receive(owner, [ReceiveTarget(0, 0, 4)], BAD)
    blocks.end_operation(BAD)
    blocks.release(owner)
    assert blocks.count_cached_tokens(run_of(TOKENS)) == 0
    assert blocks.num_allocatable == 10


def test_c23_a_second_request_never_reads_what_the_first_has_not_recomputed(
    make_manager: MakeManager,
) -> None:
    # Given R that recomputes its third block, and S with the same prompt
    blocks = make_manager(10)
    owner = admit_new(blocks, "R", 0, tokens=TOKENS)
    blocks.begin_receive(owner, [ReceiveTarget(0, 0, 4)], BAD)
    blocks.end_operation(BAD)
    blocks.settle(owner, 32)
    step = blocks.dispatch_step([owner])
    # When S is admitted before the step has completed
    assert admit_with_hit(blocks, "S", TOKENS) == 32
    shared = set(ids_of(blocks, owner)) & set(ids_of(blocks, owner_of("S")))
    # Then it shares the good blocks only, and one that comes later shares all
    assert shared == set(ids_of(blocks, owner)[:2])
    blocks.complete_step(step)
    blocks.settle(owner, 64)
    assert admit_with_hit(blocks, "T", TOKENS) == 64
