"""Heads of one layer in groups of their own: what a window lets go, when, and that nothing is lost.

Two heads with window 64 and 32 sink tokens, two that see everything; blocks of 16. A head's blocks
are its own, though all heads draw from one pool: a block that is let go for one head while
something still touches it must not be confused with another head's at the same position.
"""

import pytest

from blockmgr.block_manager import BlockManager
from blockmgr.block_table import HOLE
from blockmgr.states import BlockState
from core.errors import DoubleReleaseError, OutOfBlocksError
from core.ids import BlockId, OperationId, Owner
from core.kv_heads import num_windowed_heads
from core.kv_layout import KVGroup
from tests.blockmgr.conftest import MakeManager
from tests.blockmgr.words import admit_new, admit_with_hit, ids_of, num_free, owner_of

NUM_HEADS = 4
WINDOWED = range(num_windowed_heads(NUM_HEADS, 0.5))
FULL = range(len(WINDOWED), NUM_HEADS)
GROUPS = tuple(
    KVGroup(layers=(0,), window=64, num_sinks=32, heads=(head,))
    if head in WINDOWED
    else KVGroup(layers=(0,), heads=(head,))
    for head in range(NUM_HEADS)
)
NUM_BLOCKS = 33 * NUM_HEADS


@pytest.fixture
def blocks(make_manager: MakeManager) -> BlockManager:
    """33 blocks for each head, no prefix cache to keep what is released."""
    return make_manager(NUM_BLOCKS, *GROUPS, prefix_caching=False)


def holes_of(blocks: BlockManager, owner: Owner, head: int) -> list[int]:
    table = blocks.block_tables(owner)[head].tolist()
    return [index for index, block_id in enumerate(table) if block_id == HOLE]


def assert_holes(blocks: BlockManager, owner: Owner, expected: list[int]) -> None:
    """The windowed heads have just these holes, the others none."""
    assert [holes_of(blocks, owner, head) for head in WINDOWED] == [expected] * len(WINDOWED)
    assert [holes_of(blocks, owner, head) for head in FULL] == [[]] * len(FULL)


def test_g01_all_between_sinks_and_window_is_released(blocks: BlockManager) -> None:
    owner = admit_new(blocks, "R", 512)

    blocks.settle(owner, 512)

    assert_holes(blocks, owner, [*range(2, 28)])
    assert blocks.stats.pruned_blocks == 2 * 26
    assert num_free(blocks) == NUM_BLOCKS - NUM_HEADS * 32 + 2 * 26
    blocks.settle(owner, 512)
    assert blocks.stats.pruned_blocks == 2 * 26


def test_g02_the_next_boundary_releases_one_block_per_head(blocks: BlockManager) -> None:
    owner = admit_new(blocks, "R", 528)
    blocks.settle(owner, 512)
    next_blocks = {int(blocks.block_tables(owner)[head][28]) for head in WINDOWED}

    blocks.settle(owner, 528)

    assert_holes(blocks, owner, [*range(2, 29)])
    assert {blocks.state(BlockId(at)) for at in next_blocks} == {BlockState.FREE}
    assert blocks.stats.pruned_blocks == 2 * 27


@pytest.mark.parametrize(("settled", "holes"), [(64, []), (96, []), (112, [2])])
def test_g04_a_short_sequence_keeps_its_sinks_and_window(
    blocks: BlockManager, settled: int, holes: list[int]
) -> None:
    owner = admit_new(blocks, "R", 112)

    for num_tokens in (settled, 64, settled):
        blocks.settle(owner, num_tokens)
        assert_holes(blocks, owner, holes)


def test_g05_between_the_edges_of_blocks_nothing_is_released(blocks: BlockManager) -> None:
    """A block goes when its last token falls behind the window, and none goes before or after."""
    owner = admit_new(blocks, "R", 528)
    released: dict[int, int] = {}
    for num_tokens in range(490, 529):
        before = blocks.stats.pruned_blocks
        blocks.settle(owner, num_tokens)
        if blocks.stats.pruned_blocks != before:
            released[num_tokens] = blocks.stats.pruned_blocks - before

    # The query at position n reads from n - 63 on: with n tokens settled, block b is out from
    # n - 63 == 16 * (b + 1) on.
    assert released == {490: 2 * 24, 495: 2, 511: 2, 527: 2}


def test_g06_heads_that_see_everything_lose_nothing(blocks: BlockManager) -> None:
    owner = admit_new(blocks, "R", 512)
    before = [ids_of(blocks, owner, head) for head in range(NUM_HEADS)]

    blocks.settle(owner, 512)

    after = [ids_of(blocks, owner, head) for head in range(NUM_HEADS)]
    assert [len(ids) for ids in after] == [6, 6, 32, 32]
    assert after[2:] == before[2:]
    assert after[:2] == [ids[:2] + ids[28:] for ids in before[:2]]


def test_g07_a_block_that_a_copy_names_leaves_its_table_and_waits_for_the_copy(
    blocks: BlockManager,
) -> None:
    owner = admit_new(blocks, "R", 512)
    named = ids_of(blocks, owner, 0)[5]
    blocks.begin_operation(owner, [named], OperationId(1))

    blocks.settle(owner, 512)

    # Every block but the named one is back; that one is not lost, and not handed out
    assert_holes(blocks, owner, [*range(2, 28)])
    assert blocks.state(named) is BlockState.QUARANTINED
    assert num_free(blocks) == NUM_BLOCKS - NUM_HEADS * 32 + 2 * 26 - 1
    blocks.end_operation(OperationId(1))
    assert blocks.state(named) is BlockState.FREE
    assert num_free(blocks) == NUM_BLOCKS - NUM_HEADS * 32 + 2 * 26


def test_g08_no_block_is_lost_to_a_copy_that_ends_after_its_owner(blocks: BlockManager) -> None:
    owner = admit_new(blocks, "R", 512)
    blocks.begin_operation(owner, ids_of(blocks, owner, 1)[4:9], OperationId(1))
    blocks.settle(owner, 512)

    blocks.release(owner)

    assert blocks.counts()[BlockState.QUARANTINED] == 5
    blocks.end_operation(OperationId(1))
    assert num_free(blocks) == NUM_BLOCKS


def test_g09_a_copy_of_one_head_withholds_no_block_of_another(blocks: BlockManager) -> None:
    owner = admit_new(blocks, "R", 512)
    other, named = (ids_of(blocks, owner, head)[5] for head in WINDOWED)
    blocks.begin_operation(owner, [named], OperationId(1))

    blocks.settle(owner, 512)

    assert blocks.state(other) is BlockState.FREE
    assert blocks.state(named) is BlockState.QUARANTINED
    blocks.end_operation(OperationId(1))


def test_g11_what_a_step_in_flight_may_read_stays_for_every_head(blocks: BlockManager) -> None:
    owner = admit_new(blocks, "R", 528)
    first = blocks.dispatch_step([owner])
    second = blocks.dispatch_step([owner])
    blocks.complete_step(first)

    blocks.settle(owner, 512)

    assert_holes(blocks, owner, [*range(2, 28)])
    assert blocks.counts()[BlockState.FENCED] == 2 * 26
    blocks.complete_step(second)
    assert blocks.counts()[BlockState.FENCED] == 0
    blocks.settle(owner, 528)
    assert_holes(blocks, owner, [*range(2, 29)])
    assert num_free(blocks) == NUM_BLOCKS - NUM_HEADS * 33 + 2 * 27


def test_g12_the_end_releases_just_what_is_left(blocks: BlockManager) -> None:
    owner = admit_new(blocks, "R", 512)
    blocks.settle(owner, 512)
    # Given a newcomer that got what the windows let go
    newcomer = admit_new(blocks, "S", 208)
    assert num_free(blocks) == 2 * 26 - 4 * 13 + 4

    blocks.release(owner)

    assert num_free(blocks) == 4 + 2 * 6 + 2 * 32
    assert len(ids_of(blocks, newcomer)) == 13
    with pytest.raises(DoubleReleaseError):
        blocks.release(owner)
    assert blocks.stats.double_releases == 1
    assert num_free(blocks) == 4 + 2 * 6 + 2 * 32


def test_g14_heads_are_allocated_all_or_none(make_manager: MakeManager) -> None:
    # Given 7 free blocks, where four heads need two each
    blocks = make_manager(4 * NUM_HEADS + 7, *GROUPS)
    owner = admit_new(blocks, "R", 64)
    before = [ids_of(blocks, owner, head) for head in range(NUM_HEADS)]

    with pytest.raises(OutOfBlocksError):
        blocks.grow(owner, 96)
    with pytest.raises(OutOfBlocksError):
        admit_new(blocks, "S", 32)

    assert [ids_of(blocks, owner, head) for head in range(NUM_HEADS)] == before
    assert num_free(blocks) == 7
    assert not blocks.holds(owner_of("S"))


def test_g15_the_same_calls_give_the_same_blocks(make_manager: MakeManager) -> None:
    tables: list[list[list[int]]] = []
    for _ in range(2):
        blocks = make_manager(NUM_BLOCKS, *GROUPS)
        first = admit_new(blocks, "R", 300)
        blocks.settle(first, 300)
        second = admit_new(blocks, "S", 200)
        blocks.release(first)
        blocks.grow(second, 500)
        tables.append([table.tolist() for table in blocks.block_tables(second)])

    assert tables[0] == tables[1]


def test_g15_prefixes_are_shared_beside_windows_of_heads(make_manager: MakeManager) -> None:
    """Other systems refuse the two together."""
    blocks = make_manager(NUM_BLOCKS, *GROUPS)
    admit_with_hit(blocks, "R", range(400))
    blocks.settle(owner_of("R"), 400)

    assert admit_with_hit(blocks, "S", range(410)) == 400

    assert_holes(blocks, owner_of("S"), [*range(2, 21)])
    for head in range(NUM_HEADS):
        shared = ids_of(blocks, owner_of("R"), head)
        assert ids_of(blocks, owner_of("S"), head)[: len(shared)] == shared


@pytest.mark.parametrize("ending", ["release", "preempt"])
def test_g17_a_new_request_of_the_same_id_starts_clean(blocks: BlockManager, ending: str) -> None:
    owner = admit_new(blocks, "R", 512)
    blocks.settle(owner, 512)
    blocks.release(owner)
    assert blocks.owners == []
    assert num_free(blocks) == NUM_BLOCKS

    owner = admit_new(blocks, "R", 512 if ending == "preempt" else 100)
    blocks.settle(owner, 100)

    assert_holes(blocks, owner, [])
    blocks.release(owner)
    assert num_free(blocks) == NUM_BLOCKS


def test_resident_blocks_of_a_windowed_head_do_not_grow_with_length(
    make_manager: MakeManager,
) -> None:
    blocks = make_manager(6 * 16, *GROUPS[:1], prefix_caching=False)
    owner = admit_new(blocks, "R", 16)
    held: set[int] = set()
    for num_tokens in range(16, 20_000, 16):
        blocks.grow(owner, num_tokens)
        blocks.settle(owner, num_tokens)
        if num_tokens > 200:
            held.add(len(ids_of(blocks, owner)))

    # 2 blocks of sinks, and 64 tokens of window that end at a block's edge
    assert held == {2 + 4}
