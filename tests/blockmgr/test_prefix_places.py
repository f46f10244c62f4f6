"""Where an offer goes on, and what goes first, when others change the tree in between.

Each of these once answered a request with KV that was computed behind other tokens, or lost what
could still be hit. Blocks hold one token here.
"""

from collections.abc import Iterable

import pytest

from blockmgr.block_manager import BlockManager
from blockmgr.receive_target import ReceiveTarget
from blockmgr.states import MASK_OF_HOLD, UNIT_OF_HOLD, BlockState, Hold
from core.errors import InternalError, InvalidTransitionError
from core.ids import BlockId, OperationId, Owner
from core.kv_layout import KVGroup
from tests.blockmgr.conftest import MakeManager
from tests.blockmgr.words import admit_new, ids_of, num_free, owner_of, run_of

COPY = OperationId(1)


def compute(
    blocks: BlockManager, name: str, tokens: list[int], *, cached: int | None = None
) -> Owner:
    """Admit a request with its hit (or ``cached`` tokens of it) and settle all its tokens."""
    owner, run = owner_of(name), run_of(tokens, 1)
    hit = blocks.count_cached_tokens(run) if cached is None else cached
    blocks.admit(owner, tokens=run, num_cached_tokens=hit, num_tokens=len(tokens))
    blocks.settle(owner, len(tokens))
    return owner


def decode(blocks: BlockManager, owner: Owner, tokens: Iterable[int]) -> None:
    """Let ``owner`` go on with ``tokens``, and end."""
    run = blocks._holdings[owner].tokens
    assert run is not None
    run.extend(tokens)
    blocks.grow(owner, len(run))
    blocks.settle(owner, len(run))
    blocks.release(owner)


def evict(blocks: BlockManager, count: int) -> None:
    """Have ``count`` cached blocks evicted, and give them back."""
    blocks.release(admit_new(blocks, "taker", num_free(blocks) + count))


def count_hit(blocks: BlockManager, tokens: list[int]) -> int:
    return blocks.count_cached_tokens(run_of(tokens, 1))


def test_an_offer_does_not_go_on_in_a_run_that_was_cut_and_grew_with_other_tokens(
    make_manager: MakeManager,
) -> None:
    # Given two who compute one prompt at one time; the copy of the first is kept, and it ends
    blocks = make_manager(13, block_size=1)
    kept = compute(blocks, "A", [1, 2, 3, 4, 5, 6], cached=0)
    other = compute(blocks, "B", [1, 2, 3, 4, 5, 6], cached=0)
    blocks.release(kept)

    # When the end of the kept copy is evicted, and another prompt grows in its place
    evict(blocks, 2)
    assert count_hit(blocks, [1, 2, 3, 4, 5, 6]) == 4
    blocks.release(compute(blocks, "C", [1, 2, 3, 4, 8, 9]))

    # Then what the second goes on with is found behind its own prompt, not behind that one
    decode(blocks, other, [7])
    assert count_hit(blocks, [1, 2, 3, 4, 8, 9, 7]) == 6
    assert count_hit(blocks, [1, 2, 3, 4, 5, 6, 7]) == 7


def test_e02_a_child_that_a_copy_kept_goes_before_its_older_parent(
    make_manager: MakeManager,
) -> None:
    # Given a child whose block a copy reads on, so that its parent is out of use before it
    blocks = make_manager(8, block_size=1)
    b = compute(blocks, "B", [1, 3])
    a = compute(blocks, "A", [1, 2])
    blocks.begin_operation(a, ids_of(blocks, a)[1:], COPY)
    blocks.release(b)
    blocks.release(a)
    blocks.end_operation(COPY)

    # When two of the three go in one batch
    evict(blocks, 2)

    # Then the parent is not one of them
    assert count_hit(blocks, [1]) == 1
    blocks.check_invariants()


def test_a_prefix_is_hit_in_its_own_place_after_a_batch(make_manager: MakeManager) -> None:
    # Given the same, and a prompt that others branch off from
    blocks = make_manager(16, block_size=1)
    b = compute(blocks, "B", [1, 3])
    a = compute(blocks, "A", [1, 2])
    blocks.begin_operation(a, ids_of(blocks, a)[1:], COPY)
    blocks.release(b)
    blocks.release(a)
    blocks.end_operation(COPY)
    h, g = compute(blocks, "H", [5]), compute(blocks, "G", [5, 8])
    evict(blocks, 2)
    k = compute(blocks, "K", [5, 7])
    blocks.release(g)
    blocks.release(k)
    evict(blocks, 2)

    # When the first one goes on
    decode(blocks, h, [9])

    # Then nothing that was computed behind [5] is found behind [5, 9]
    assert count_hit(blocks, [5, 9, 7]) == 2
    assert count_hit(blocks, [5, 9, 8]) == 2


def test_e17_what_a_copy_still_reads_costs_its_prefix_only_what_is_missing(
    make_manager: MakeManager,
) -> None:
    blocks = make_manager(101, block_size=1)
    owner = compute(blocks, "A", list(range(100)))
    blocks.begin_operation(owner, ids_of(blocks, owner)[99:], COPY)
    blocks.release(owner)

    admit_new(blocks, "B", 2)

    assert count_hit(blocks, list(range(100))) == 98
    assert blocks.counts()[BlockState.QUARANTINED] == 1
    blocks.end_operation(COPY)


def test_a_copy_that_was_kept_and_lost_is_offered_again_by_who_has_the_other(
    make_manager: MakeManager,
) -> None:
    blocks = make_manager(8, block_size=1)
    kept = compute(blocks, "A", [1, 2, 3], cached=0)
    other = compute(blocks, "B", [1, 2, 3], cached=0)
    blocks.release(kept)
    evict(blocks, 3)
    assert count_hit(blocks, [1, 2, 3]) == 0

    blocks.release(other)

    assert count_hit(blocks, [1, 2, 3]) == 3


def test_a_prefix_of_which_no_block_was_received_leaves_no_node(make_manager: MakeManager) -> None:
    # Given a model of one short window: a read brings the last block, and the full one is a hole
    blocks = make_manager(8, KVGroup(layers=(0,), window=2), block_size=4)
    for number in range(20):
        owner = owner_of(f"R{number}")
        tokens = run_of([number + 1] * 7, 4)
        blocks.admit(owner, tokens=tokens, num_cached_tokens=0, num_tokens=0)
        operation = OperationId(number + 1)
        blocks.begin_receive(owner, [ReceiveTarget(0, 1, 1)], operation)
        blocks.end_operation(operation)
        blocks.settle(owner, 7)
        blocks.release(owner)

    assert blocks._tree.num_nodes == 0
    assert num_free(blocks) == 8


def test_i5_settling_looks_at_what_has_landed_each_time(make_manager: MakeManager) -> None:
    blocks = make_manager(8, block_size=4)
    owner = owner_of("R")
    tokens = run_of(range(16), 4)
    blocks.admit(owner, tokens=tokens, num_cached_tokens=0, num_tokens=0)
    blocks.begin_receive(owner, [ReceiveTarget(0, 0, 1)], OperationId(1))
    blocks.end_operation(OperationId(1))
    blocks.begin_receive(owner, [ReceiveTarget(0, 1, 3)], OperationId(2))
    blocks.settle(owner, 4)

    with pytest.raises(InvalidTransitionError):
        blocks.settle(owner, 6)

    blocks.end_operation(OperationId(2))
    blocks.settle(owner, 6)


@pytest.mark.parametrize("hold", [Hold.OWNER, Hold.OPERATION])
def test_i8_a_full_counter_is_told_before_anything_changes(
    make_manager: MakeManager, hold: Hold
) -> None:
    # Given a block of a shared prefix that has as many owners, or operations, as can be counted
    blocks = make_manager(8, block_size=1)
    first = compute(blocks, "A", [1, 2, 3])
    block_id = ids_of(blocks, first)[1]
    present = blocks._pool._word_of[block_id] & MASK_OF_HOLD[hold]
    missing = MASK_OF_HOLD[hold] - present
    blocks._pool._word_of[block_id] += missing
    words = blocks._pool._words.copy()

    def one_more() -> None:
        if hold is Hold.OWNER:
            compute(blocks, "B", [1, 2, 3])
        else:
            blocks.begin_operation(first, map(BlockId, ids_of(blocks, first)), COPY)

    # When one more comes
    with pytest.raises(InternalError, match=rf"{hold.name} as can be counted"):
        one_more()

    # Then nothing has changed
    assert (blocks._pool._words == words).all()
    assert not blocks.holds(owner_of("B"))
    blocks._pool._word_of[block_id] -= missing
    assert UNIT_OF_HOLD[hold] <= MASK_OF_HOLD[hold]
