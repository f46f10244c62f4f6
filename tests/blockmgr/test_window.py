"""A sliding window may only drop what no step in flight can read.

A scheduler that runs ahead counts tokens whose step has not completed. Pruning by that count
releases a block that the step in flight still reads, and the request's answer changes silently.
"""

import pytest

from blockmgr.block_manager import BlockManager
from blockmgr.block_table import HOLE
from blockmgr.receive_target import ReceiveTarget
from blockmgr.states import BlockState
from blockmgr.window import first_live_block, needed_blocks, num_sink_blocks
from core.errors import InvalidTransitionError
from core.ids import OperationId, Owner
from core.kv_layout import KVGroup
from tests.blockmgr.conftest import MakeManager
from tests.blockmgr.words import (
    admit_new,
    admit_with_hit,
    ids_of,
    num_free,
    owner_of,
    run_of,
)


def holes_of(blocks: BlockManager, owner: Owner, group: int = 0) -> list[int]:
    table = blocks.block_tables(owner)[group].tolist()
    return [index for index, block_id in enumerate(table) if block_id == HOLE]


def test_b03_only_settled_tokens_move_the_window(make_manager: MakeManager) -> None:
    # Given window 32 and blocks of 16: 64 tokens processed, 16 in flight
    blocks = make_manager(10, KVGroup(layers=(0,), window=32))
    owner = admit_new(blocks, "R", 80)
    first = blocks.dispatch_step([owner])
    second = blocks.dispatch_step([owner])
    blocks.complete_step(first)

    # When what is behind the window of the settled tokens is pruned
    blocks.settle(owner, 64)

    # Then block 2 stays, which the step in flight reads, until its output is processed
    assert holes_of(blocks, owner) == [0, 1]
    blocks.complete_step(second)
    blocks.settle(owner, 80)
    assert holes_of(blocks, owner) == [0, 1, 2]


def test_b03_pruned_blocks_pass_the_same_fence(make_manager: MakeManager) -> None:
    blocks = make_manager(10, KVGroup(layers=(0,), window=32))
    owner = admit_new(blocks, "R", 80)
    first = blocks.dispatch_step([owner])
    second = blocks.dispatch_step([owner])
    blocks.complete_step(first)

    blocks.settle(owner, 64)

    assert blocks.counts()[BlockState.FENCED] == 2
    blocks.complete_step(second)
    assert num_free(blocks) == 7


class PruneByDispatchedTokens(BlockManager):
    """The guard switched off: tokens in flight count as settled."""

    tokens_in_flight = 0

    def settle(self, owner: Owner, num_tokens: int) -> None:
        super().settle(owner, num_tokens + self.tokens_in_flight)


def test_b03_fails_where_tokens_in_flight_count_as_settled(make_manager: MakeManager) -> None:
    blocks = make_manager(10, KVGroup(layers=(0,), window=32), kind=PruneByDispatchedTokens)
    blocks.tokens_in_flight = 16  # type: ignore[attr-defined]
    owner = admit_new(blocks, "R", 80)
    blocks.dispatch_step([owner])

    blocks.settle(owner, 64)

    assert 2 in holes_of(blocks, owner), "the step in flight reads block 2 from position 33 on"


@pytest.mark.parametrize(("settled", "holes"), [(157, []), (158, []), (159, [0]), (160, [0])])
def test_b04_the_edge_of_the_window_is_exact(
    make_manager: MakeManager, settled: int, holes: list[int]
) -> None:
    # Position 158 reads back to token 31, the last one of block 0; position 159 does not
    blocks = make_manager(10, KVGroup(layers=(0,), window=128), block_size=32)
    owner = admit_new(blocks, "R", 160)

    blocks.settle(owner, settled)

    assert holes_of(blocks, owner) == holes


def test_no_query_to_come_reads_a_hole() -> None:
    for window in (1, 2, 15, 16, 17, 40):
        for num_sinks in (0, 1, 16, 20):
            group = KVGroup(layers=(0,), window=window, num_sinks=num_sinks)
            for settled in range(1, 100):
                kept = {
                    index * 16 + offset
                    for run in needed_blocks(group, 16, settled)
                    for index in run
                    for offset in range(16)
                }
                reads = {*range(max(0, settled - window + 1), settled), *range(num_sinks)}
                assert {at for at in reads if at < settled} <= kept
                first = first_live_block(group, 16, settled)
                assert first == 0 or (first * 16 <= settled - window + 1 < (first + 1) * 16)


def test_sinks_stay_and_the_cursor_only_moves_forward(make_manager: MakeManager) -> None:
    # Given window 64, sink 32 and 512 settled tokens
    group = KVGroup(layers=(0,), window=64, num_sinks=32)
    blocks = make_manager(40, group)
    owner = admit_new(blocks, "R", 512)
    blocks.settle(owner, 512)
    assert num_sink_blocks(group, 16) == 2
    assert holes_of(blocks, owner) == list(range(2, 28))

    # When it settles again, less, and one block more
    for num_tokens in (512, 400):
        blocks.settle(owner, num_tokens)
        assert len(holes_of(blocks, owner)) == 26
    blocks.grow(owner, 528)
    blocks.settle(owner, 528)

    # Then exactly one block more goes, and the end releases what is left
    assert holes_of(blocks, owner) == list(range(2, 29))
    assert len(ids_of(blocks, owner)) == 6
    blocks.release(owner)
    assert num_free(blocks) == 40
    assert blocks.stats.pruned_blocks == 27


def test_growing_does_not_fill_what_the_window_dropped(make_manager: MakeManager) -> None:
    blocks = make_manager(10, KVGroup(layers=(0,), window=16), KVGroup(layers=(1,)))
    owner = admit_new(blocks, "R", 64)
    blocks.settle(owner, 64)

    blocks.grow(owner, 65)

    assert holes_of(blocks, owner, 0) == [0, 1, 2]
    assert holes_of(blocks, owner, 1) == []
    assert blocks.num_tokens_covered(owner) == 80


def test_a_hit_needs_what_its_window_reaches_back_to(make_manager: MakeManager) -> None:
    # Given a cached prompt of 6 blocks, of which the window group used the last one until its end
    blocks = make_manager(20, KVGroup(layers=(0,)), KVGroup(layers=(1,), window=17))
    run = run_of(range(96))
    admit_with_hit(blocks, "R", range(96))
    blocks.settle(owner_of("R"), 96)
    blocks.release(owner_of("R"))
    assert blocks.count_cached_tokens(run) == 96

    # When the window group's other blocks are evicted, then the whole prompt still hits
    filler = admit_new(blocks, "F", 0)
    blocks.begin_receive(filler, [ReceiveTarget(0, 0, 13)], OperationId(1))
    assert blocks.stats.evictions == 5
    assert blocks.count_cached_tokens(run) == 96
    assert blocks.count_cached_tokens(run, 80) == 0
    with pytest.raises(InvalidTransitionError):
        blocks.admit(owner_of("S"), tokens=run, num_cached_tokens=80, num_tokens=96)

    # When the full group loses its last one, then no shorter hit has its window
    blocks.begin_receive(filler, [ReceiveTarget(0, 13, 1)], OperationId(2))
    assert blocks.count_cached_tokens(run) == 0
    for operation in (1, 2):
        blocks.end_operation(OperationId(operation))


def test_a_hit_behind_the_window_is_holes_from_the_start(make_manager: MakeManager) -> None:
    blocks = make_manager(20, KVGroup(layers=(0,)), KVGroup(layers=(1,), window=17))
    tokens = range(96)
    admit_with_hit(blocks, "R", tokens)
    blocks.settle(owner_of("R"), 96)
    blocks.release(owner_of("R"))

    assert admit_with_hit(blocks, "S", range(100)) == 96

    assert holes_of(blocks, owner_of("S"), 0) == []
    assert holes_of(blocks, owner_of("S"), 1) == [0, 1, 2, 3, 4]
    assert len(ids_of(blocks, owner_of("S"), 1)) == 2


def test_a_window_of_one_token_covers_its_hit(make_manager: MakeManager) -> None:
    blocks = make_manager(20, KVGroup(layers=(0,)), KVGroup(layers=(1,), window=1))
    tokens = range(32)
    admit_with_hit(blocks, "R", tokens)
    blocks.settle(owner_of("R"), 32)

    assert admit_with_hit(blocks, "S", range(40)) == 32

    assert holes_of(blocks, owner_of("S"), 1) == [0, 1]
    assert blocks.num_tokens_covered(owner_of("S")) == 48
