"""A ticket may name only KV that has settled, each block once, and only what decode will read.

A ticket too early gives the reader half-written blocks; one that shifts indices gives it the wrong
ones; both are wrong text without an error.
"""

from collections.abc import Iterator

import pytest

from blockmgr.block_manager import BlockManager
from blockmgr.block_table import HOLE
from blockmgr.receive_target import ReceiveTarget
from blockmgr.states import BlockState
from core.errors import RequestError
from core.ids import Attempt, OperationId, RequestId
from prefill.offers import SettledChunk
from tests.prefill.bench import Bench


@pytest.fixture
def bench() -> Iterator[Bench]:
    """Ten blocks, one group."""
    made = Bench(10)
    yield made
    made.scheduler.check_invariants()


def indices(offers: list[SettledChunk], group: int = 0) -> list[list[int]]:
    return [
        [
            named.first_index + at
            for named in offer.blocks
            if named.group == group
            for at in range(len(named.block_ids))
        ]
        for offer in offers
    ]


def test_each_chunk_offers_its_full_blocks_and_the_last_one_the_rest(bench: Bench) -> None:
    bench.add("R", 70)
    offers = bench.run()
    assert indices(offers) == [[0, 1], [2, 3], [4]]
    assert [offer.num_tokens for offer in offers] == [32, 64, 70]
    assert [offer.chunk for offer in offers] == [0, 1, 2]
    assert [offer.first_token is not None for offer in offers] == [False, False, True]


def test_b12_nothing_is_offered_before_its_step_has_completed(bench: Bench) -> None:
    bench.add("R", 64)
    first, second = bench.scheduler.schedule(), bench.scheduler.schedule()
    assert first is not None
    assert second is not None
    assert indices(bench.complete(first)) == [[0, 1]]
    assert indices(bench.complete(second)) == [[2, 3]]


def test_c10_blocks_are_named_by_absolute_index_behind_decodes_prefix(bench: Bench) -> None:
    bench.add("R", 100, first_token=48)
    offers = bench.run()
    assert indices(offers) == [[3], [4, 5], [6]]


def test_c13_prompt_shorter_than_a_block_is_one_ticket(bench: Bench) -> None:
    bench.add("R", 5)
    (offer,) = bench.run()
    assert indices([offer]) == [[0]]
    assert offer.first_token is not None


def test_d01_finished_prompt_is_leased_and_released_once(bench: Bench) -> None:
    bench.add("R", 40)
    (_, last) = bench.run()
    assert bench.blocks.counts()[BlockState.LEASED] == 3
    bench.blocks.release(last.prompt.owner)
    assert bench.blocks.counts()[BlockState.LEASED] == 0


def test_cached_prefix_is_offered_without_being_computed(bench: Bench) -> None:
    bench.add("A", 64)
    bench.blocks.release(bench.run()[-1].prompt.owner)
    bench.add("B", 64)
    batch = bench.scheduler.schedule()
    assert batch is not None
    assert batch.num_tokens == 16
    (offer,) = bench.complete(batch)
    assert indices([offer]) == [[0, 1, 2, 3]]
    assert offer.prompt.num_cached_tokens == 48


def test_cancel_in_flight_waits_for_the_step_and_offers_nothing(bench: Bench) -> None:
    bench.add("R", 32)
    batch = bench.scheduler.schedule()
    assert batch is not None
    assert bench.scheduler.cancel((RequestId("R"), Attempt(1)))
    assert bench.blocks.counts()[BlockState.FENCED] == 2
    assert bench.complete(batch) == []
    assert bench.blocks.counts()[BlockState.FREE] == 10
    assert not bench.scheduler.cancel((RequestId("R"), Attempt(1)))


def test_prompt_waits_for_memory_without_a_trace(bench: Bench) -> None:
    bench.add("A", 96)
    bench.add("B", 96, salt=1000)
    offers = bench.run()
    assert {offer.prompt.owner[0] for offer in offers} == {"A"}
    assert bench.scheduler.num_waiting == 1
    bench.blocks.release(offers[-1].prompt.owner)
    assert {offer.prompt.owner[0] for offer in bench.run()} == {"B"}


def test_empty_prompt_is_refused(bench: Bench) -> None:
    with pytest.raises(RequestError, match="empty"):
        bench.add("R", 0)
    assert bench.scheduler.num_waiting == 0


def test_prompt_larger_than_the_pool_is_refused(bench: Bench) -> None:
    with pytest.raises(RequestError, match="shorten the prompt"):
        bench.add("R", 161)


def test_d16_blocks_behind_the_window_are_not_advertised() -> None:
    made = Bench(20, windows=(None, 32))
    made.add("R", 100)
    offers = made.run()
    assert indices(offers, group=0) == [[0, 1], [2, 3], [4, 5], [6]]
    # Decode reads from position 100 - 32 + 1 = 69 on: block 4.
    assert indices(offers, group=1) == [[], [], [4, 5], [6]]
    made.scheduler.check_invariants()


def test_g16_of_a_recycled_request_sinks_and_window_go_over() -> None:
    # Given a prompt of which the window has let go of blocks 2 to 27
    made = Bench(80, windows=(64, None), num_sinks=32)
    owner = made.add("R", 512)
    offers = made.run()
    assert made.blocks.block_tables(owner)[0].tolist()[2:28] == [HOLE] * 26

    # Then the tickets name just the rest, and decode's table gets the same shape
    named = [run for offer in offers for run in offer.blocks if run.group == 0]
    assert [run.first_index + at for run in named for at in range(len(run.block_ids))] == [
        0,
        1,
        28,
        29,
        30,
        31,
    ]
    decode = BlockManager(made.layout, 40, fences=True, prefix_caching=True)
    decode.admit(owner, tokens=None, num_cached_tokens=0, num_tokens=0)
    targets = [
        ReceiveTarget(run.group, run.first_index, len(run.block_ids))
        for offer in offers
        for run in offer.blocks
    ]
    decode.begin_receive(owner, targets, OperationId(1))
    decode.end_operation(OperationId(1))
    decode.settle(owner, 512)
    for group in range(2):
        ours, theirs = (each.block_tables(owner)[group] for each in (decode, made.blocks))
        assert ((ours == HOLE) == (theirs == HOLE)).all()
    decode.check_invariants()
