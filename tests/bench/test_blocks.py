"""The block benchmark measures what it says: the right hits, the same trees, and every leak."""

import json
import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from bench import blocks, peers
from bench.blocks_draws import StormPlan, draws
from bench.blocks_evict import SHAPES, EvictPlan, HeapCache, SluiceCache, measure_evictions
from bench.blocks_leaks import count_leaked, measure_storm
from bench.blocks_life import cases, life_figures, life_ratios, measure_lives
from bench.blocks_sluice import SluiceSide
from bench.blocks_storm import Storm
from bench.blocks_task import (
    BLOCK_SIZE,
    HIT_TOKENS,
    REQUEST_BLOCKS,
    Case,
    Life,
    Order,
    UnexpectedHitError,
    prompt,
    require_hit,
)
from bench.blocks_waits import Histogram, WaitClock
from bench.heap_per_node import HeapPerNodeCache
from blockmgr.free_queue import BlockIds
from blockmgr.states import BlockState
from core.ids import Attempt, RequestId

SMALL = ["--quick", "--pool-sizes", "2000", "--rounds", "1", "--requests", "600"]
SMALL += ["--cached-blocks", "2000", "--no-peer"]


def ids(*block_ids: int) -> BlockIds:
    return np.array(block_ids, dtype=np.int32)


# The command line and its report


def test_whole_run_ends_with_one_json_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["bench.blocks", *SMALL])

    assert blocks.main() == 0

    *table, last = capsys.readouterr().out.splitlines()
    assert table[-1] == blocks.QUICK_NOTE
    found = json.loads(last)
    assert found["bench"] == "blocks"
    assert set(found) == {"bench", "ratios", "figures", "machine", "missing"}
    assert set(found["figures"]) == {"parameters", "life", "evict", "storm"}
    assert found["ratios"]["600 requests: no block leaked"] == 1
    assert found["ratios"]["600 requests: no double release"] == 1
    assert found["missing"] == ["vllm: not asked for"]
    assert not [name for name in found["ratios"] if "vLLM" in name]


def test_defaults_are_the_documented_ones_and_quick_is_smaller() -> None:
    usual, quick = blocks.parse([]), blocks.parse(["--quick"])

    assert (usual.pool_sizes, usual.requests) == ((10_000, 1_000_000), 1_000_000)
    assert usual.cached_blocks == 100_000
    assert (quick.pool_sizes, quick.requests) == ((10_000,), 20_000)
    assert blocks.parse(["--quick", "--requests", "7"]).requests == 7


@pytest.mark.parametrize(
    "arguments", [["--parts", "tiers"], ["--rounds", "0"], ["--pool-sizes", "1,x"]]
)
def test_wrong_argument_starts_nothing(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as excinfo:
        blocks.parse(arguments)

    assert excinfo.value.code == 2
    assert arguments[0] in capsys.readouterr().err


def test_part_that_is_left_out_is_named() -> None:
    results = blocks.measure(blocks.parse([*SMALL, "--parts", "evict"]))

    assert results.missing == ["storm: not asked for", "life: not asked for"]


# A request's life


def test_prompts_share_exactly_the_hit() -> None:
    first, second = prompt(1, HIT_TOKENS), prompt(2, HIT_TOKENS)

    assert first[:HIT_TOKENS] == second[:HIT_TOKENS]
    assert first[HIT_TOKENS] != second[HIT_TOKENS]
    assert prompt(1, 0)[:2] != prompt(30_001, 0)[:2]


@pytest.mark.parametrize("with_steps", [False, True])
@pytest.mark.parametrize("case", cases([2_000]), ids=lambda case: case.name)
def test_our_side_finds_the_hit_of_its_case_and_leaves_nothing_held(
    case: Case, *, with_steps: bool
) -> None:
    side = SluiceSide(with_steps=with_steps)

    for _ in range(2):  # the second order starts from what the first one left
        assert len(side.carry_out(Order(case, 2))) == 2

    manager = side._blocks
    manager.check_invariants()
    counts = manager.counts()
    assert counts[BlockState.FREE] + counts[BlockState.CACHED] == case.num_blocks
    needed = REQUEST_BLOCKS - case.hit_tokens // BLOCK_SIZE
    assert (counts[BlockState.FREE] < needed) is case.is_full
    assert manager.stats.double_releases == 0


def test_unexpected_hit_is_no_measurement() -> None:
    with pytest.raises(UnexpectedHitError, match="found 16 cached tokens"):
        require_hit(16, Case(1_000, 0, is_full=False))


def test_ratio_is_one_where_a_life_takes_a_tenth_of_the_peers() -> None:
    all_cases = [Case(10_000, 0, is_full=False), Case(1_000_000, 0, is_full=False)]
    ours = life_figures([Life(50, 20, 60, 20)] * 2)
    theirs = life_figures([Life(1_000, 200, 600, 200)] * 2)
    slower = {**ours, "manager_us": 250.0, "whole_us": 300.0}
    figures = {
        all_cases[0].name: {"sluice": ours, "vllm": theirs},
        all_cases[1].name: {"sluice": slower, "vllm": theirs},
    }

    assert life_ratios(figures, all_cases) == {
        "life of a request, cold, 10,000 blocks: manager, 10x vLLM's": 1.0,
        "life of a request, cold, 10,000 blocks: whole, 10x vLLM's": 1.3333,
        "life of a request, cold, 1,000,000 blocks: manager, 10x vLLM's": 0.4,
        "life of a request, cold, 1,000,000 blocks: whole, 10x vLLM's": 0.6667,
        "life of a request, cold: 1M blocks at most 1.25x 10k": 0.5,
    }


def test_sides_take_turns() -> None:
    turns: list[int] = []

    def peer(order: Order) -> Sequence[Life]:
        turns.append(order.repeats)
        return [Life(1.0, 1.0, 1.0, 1.0)] * order.repeats

    result = measure_lives([Case(8_000, 0, is_full=False)], rounds=3, peer=peer)

    assert turns == [1, 12, 12, 12]
    assert set(result.figures["cold, 8,000 blocks"]) == {"sluice", "sluice_with_steps", "vllm"}


def test_peer_that_cannot_start_is_missing_and_ours_is_measured_all_the_same(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # Given an environment without vLLM where vLLM's is looked for
    monkeypatch.setattr(peers, "vllm_python", lambda: Path(sys.executable))
    monkeypatch.setattr(peers, "vllm_is_made", lambda: True)
    monkeypatch.setattr(blocks, "cache_folder", lambda: tmp_path)
    small = [argument for argument in SMALL if argument != "--no-peer"]

    results = blocks.measure(blocks.parse([*small, "--parts", "life"]))

    assert "No module named 'vllm'" in results.missing[-1]
    assert set(results.lives["cold, 2,000 blocks"]) == {"sluice", "sluice_with_steps"}


# Evictions


def random_paths(rng: random.Random, count: int) -> list[tuple[int, ...]]:
    # All equally long: a sequence that ends inside of another one's run keeps that run as a whole
    # fresh in our tree, whose recency is that of runs, and only its own blocks in the peer's.
    return [tuple(rng.randrange(3) for _ in range(6)) for _ in range(count)]


class EvictionLog:
    """Observer that knows which content each block has, and notes what is evicted."""

    def __init__(self) -> None:
        self.content: dict[int, tuple[int, ...]] = {}
        self.evicted: list[tuple[int, ...]] = []

    def moved(self, block_ids: BlockIds, old: BlockState, new: BlockState) -> None:
        if (old, new) == (BlockState.CACHED, BlockState.FREE):
            self.evicted += [self.content.pop(block_id) for block_id in block_ids.tolist()]


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("batch", [1, 7])
def test_heap_of_nodes_evicts_what_we_evict(seed: int, batch: int) -> None:
    # Given the same sequences in both caches, some of them more than once
    rng = random.Random(seed)
    log = EvictionLog()
    ours, theirs = SluiceCache(400, observers=(log,)), HeapCache(400)
    content: dict[int, tuple[int, ...]] = {}
    for path in random_paths(rng, 60):
        table = ours.use(path)
        node = theirs.use(path)
        for depth, block_id in reversed(list(enumerate(table, 1))):
            log.content[block_id] = path[:depth]
            content[node.block_id] = path[:depth]
            assert node.parent is not None
            node = node.parent
    assert ours.num_free == theirs.num_free

    # When blocks are evicted until none is left
    order: list[tuple[int, ...]] = []
    while ours.num_free < 400:
        wanted = min(batch, 400 - ours.num_free)
        ours.take(ours.num_free + wanted)
        order += [content[block_id] for block_id in theirs.tree.evict(wanted)]

        # Then each batch is the same
        assert sorted(log.evicted) == sorted(order)
        theirs.tree.check_invariants()
    if batch == 1:
        assert log.evicted == order


@pytest.mark.parametrize("path_of", SHAPES.values(), ids=SHAPES)
def test_both_caches_hold_equally_many_blocks_of_every_shape(
    path_of: Callable[[int], tuple[int, ...]],
) -> None:
    ours, theirs = SluiceCache(1_200), HeapCache(1_200)

    for serial in range(2 if path_of is SHAPES["chains"] else 300):
        ours.use(path_of(serial))
        theirs.use(path_of(serial))

    assert ours.num_free == theirs.num_free < 1_200
    ours.blocks.check_invariants()
    theirs.tree.check_invariants()


def test_used_leaf_survives_eviction_and_is_evictable_later() -> None:
    tree = HeapPerNodeCache(3)
    used = tree.insert("a")
    tree.release(tree.insert("b"))

    assert len(tree.evict(3)) == 1

    tree.release(used)
    assert tree.evict(3) == [used.block_id]
    tree.check_invariants()


def test_parent_follows_its_last_child() -> None:
    tree = HeapPerNodeCache(3)
    blocks_of = {path: tree.insert(path).block_id for path in ("a", "ab", "ac")}
    tree = HeapPerNodeCache(3)
    for path in ("a", "ab", "ac"):
        tree.release(tree.insert(path))

    assert tree.evict(3) == [blocks_of[path] for path in ("ab", "ac", "a")]


def test_evictions_report_both_sides_of_every_shape() -> None:
    plan = EvictPlan(num_blocks=1_200, num_evicted=100, repeats=1, admissions=2)

    result = measure_evictions(plan)

    assert set(result.figures) == {*(f"evict_{shape}" for shape in SHAPES), "admit_under_eviction"}
    assert len(result.ratios) == len(SHAPES)


# The storm


@pytest.mark.parametrize("seed", range(3))
def test_storm_in_a_tight_pool_ends_every_request_and_leaks_nothing(seed: int) -> None:
    storm = Storm(StormPlan(1_500, num_blocks=200, seed=seed))

    for _ in storm.run():
        pass

    assert storm.num_ended == 1_500
    assert storm.num_aborted > 0
    assert storm.num_preempted > 0
    assert storm.num_refused > 0
    assert storm.blocks.stats.double_releases == 0
    assert count_leaked(storm) == 0


def test_block_that_is_still_held_counts_as_leaked() -> None:
    storm = Storm(StormPlan(50))
    for _ in storm.run():
        pass
    storm.blocks.admit(
        (RequestId("forgotten"), Attempt(1)), tokens=None, num_cached_tokens=0, num_tokens=40
    )

    assert count_leaked(storm) == 3


def test_draws_depend_on_their_seed_alone_and_keep_their_bounds() -> None:
    plan = StormPlan(3_000)

    found = list(draws(plan))

    assert found == list(draws(plan))
    assert [draw.serial for draw in found] == list(range(3_000))
    assert all(plan.min_tokens <= draw.num_tokens <= plan.max_tokens for draw in found)
    assert all(draw.num_shared < draw.num_tokens - draw.num_outputs for draw in found)


def test_storm_reports_waits_in_both_states() -> None:
    figures = measure_storm(StormPlan(300)).figures

    for state in ("fenced", "quarantined"):
        assert figures[f"{state}_blocks"] > 0
        assert figures[f"{state}_us_p50"] <= figures[f"{state}_us_p99"]
        assert figures[f"{state}_steps_p50"] >= 1


# Waiting times


def test_stay_is_measured_from_entry_to_leaving_per_state() -> None:
    # Given block 1 that is fenced for 3 us, then quarantined for 40 us and two steps
    now = 0
    clock = WaitClock(4, lambda: now)
    clock.moved(ids(1, 2), BlockState.ACTIVE, BlockState.FENCED)
    now = 3_000
    clock.moved(ids(1), BlockState.FENCED, BlockState.QUARANTINED)
    now, clock.steps = 43_000, 2
    clock.moved(ids(1), BlockState.QUARANTINED, BlockState.FREE)

    figures = clock.figures()

    assert (figures["fenced_blocks"], figures["quarantined_blocks"]) == (1, 1)
    assert figures["fenced_us_p50"] == pytest.approx(3, rel=0.03)
    assert figures["quarantined_us_p99"] == pytest.approx(40, rel=0.03)
    assert figures["quarantined_steps_p99"] == 2


def test_percentile_is_exact_to_a_bin() -> None:
    histogram = Histogram()
    for start in range(1, 1_001, 2):  # more parts than are folded at once
        histogram.add(np.arange(start, start + 2))

    assert len(histogram) == 1_000
    assert histogram.percentile(50) == pytest.approx(500, rel=0.03)
    assert histogram.percentile(99) == pytest.approx(990, rel=0.03)
