"""How long blocks are withheld decides whether a quarantine is a bug: the numbers must be right.

The failure guarded against: a histogram that hides the one slow block, counts a block twice, or
costs so much that it is turned off.
"""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from blockmgr.age_metrics import AgeCollector
from blockmgr.block_ages import BlockAges
from blockmgr.sampled_histogram import SampledHistogram
from blockmgr.states import BlockState


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def ids(*block_ids: int) -> np.ndarray:
    return np.array(block_ids, dtype=np.int32)


def made(num_blocks: int = 8) -> tuple[BlockAges, Clock]:
    clock = Clock()
    return BlockAges(num_blocks, clock=clock), clock


def counts(histogram: SampledHistogram) -> dict[float, float]:
    """Return how many durations each bucket holds alone, of those that hold any."""
    totals, _ = histogram.read()
    numbers = np.diff([0.0, *(total for _, total in totals)])
    return {bound: n for (bound, _), n in zip(totals, numbers, strict=True) if n}


def test_a_life_is_measured_from_allocation_until_free_through_all_states() -> None:
    ages, clock = made()
    ages.moved(ids(1, 2), BlockState.FREE, BlockState.ACTIVE)
    clock.now += 2.0
    ages.moved(ids(1, 2), BlockState.ACTIVE, BlockState.FENCED)
    clock.now += 0.004
    ages.moved(ids(1), BlockState.FENCED, BlockState.QUARANTINED)
    ages.moved(ids(2), BlockState.FENCED, BlockState.FREE)
    clock.now += 4.0
    ages.moved(ids(1), BlockState.QUARANTINED, BlockState.FREE)

    assert counts(ages.lifetimes) == {5.0: 1, 15.0: 1}
    assert counts(ages.withheld_times[BlockState.FENCED]) == {0.005: 2}
    assert counts(ages.withheld_times[BlockState.QUARANTINED]) == {5.0: 1}
    assert counts(ages.idle_times) == {}


def test_idle_time_ends_with_the_eviction_and_not_with_a_hit() -> None:
    ages, clock = made()
    ages.moved(ids(3), BlockState.FREE, BlockState.ACTIVE)
    ages.moved(ids(3), BlockState.ACTIVE, BlockState.CACHED)
    clock.now += 50.0
    ages.moved(ids(3), BlockState.CACHED, BlockState.ACTIVE)
    ages.moved(ids(3), BlockState.ACTIVE, BlockState.CACHED)
    clock.now += 0.3
    ages.moved(ids(3), BlockState.CACHED, BlockState.FREE)
    assert counts(ages.idle_times) == {0.5: 1}
    assert counts(ages.lifetimes) == {60.0: 1}


def test_i06_the_oldest_quarantined_block_is_seen_until_it_leaves() -> None:
    ages, clock = made()
    assert ages.oldest_withheld_s(BlockState.QUARANTINED) == 0.0
    for block_id in (1, 2):
        ages.moved(ids(block_id), BlockState.FREE, BlockState.ACTIVE)
        ages.moved(ids(block_id), BlockState.ACTIVE, BlockState.QUARANTINED)
        clock.now += 10.0
    assert ages.oldest_withheld_s(BlockState.QUARANTINED) == 20.0
    ages.moved(ids(1), BlockState.QUARANTINED, BlockState.FREE)
    assert ages.oldest_withheld_s(BlockState.QUARANTINED) == 10.0
    ages.moved(ids(2), BlockState.QUARANTINED, BlockState.FREE)
    assert ages.oldest_withheld_s(BlockState.QUARANTINED) == 0.0
    assert ages.oldest_withheld_s(BlockState.FENCED) == 0.0


def test_blocks_in_use_since_a_moment_are_told_from_newer_ones() -> None:
    ages, clock = made()
    ages.moved(ids(1), BlockState.FREE, BlockState.ACTIVE)
    asked_at = ages.now()
    clock.now += 1.0
    ages.moved(ids(2), BlockState.FREE, BlockState.ACTIVE)
    assert ages.has_older_than(asked_at)
    ages.moved(ids(1), BlockState.ACTIVE, BlockState.FREE)
    assert not ages.has_older_than(asked_at)
    ages.moved(ids(1), BlockState.FREE, BlockState.ACTIVE)
    assert not ages.has_older_than(asked_at)


@given(st.lists(st.tuples(st.integers(1, 700), st.floats(0, 20)), max_size=12))
def test_every_block_is_counted_once_however_large_its_batch(
    batches: list[tuple[int, float]],
) -> None:
    histogram = SampledHistogram((0.5, 1.0, 10.0))
    expected = np.zeros(4)
    for number, age in batches:
        histogram.observe(np.zeros(700), np.arange(number), age)
        expected[np.searchsorted((0.5, 1.0, 10.0), age)] += number
    totals, seconds = histogram.read()
    assert [total for _, total in totals] == list(np.cumsum(expected))
    assert np.isclose(seconds, sum(number * age for number, age in batches))
    assert histogram.read() == (totals, seconds)


def test_the_exposition_has_every_state_from_the_first_scrape_on() -> None:
    registry = CollectorRegistry()
    ages, clock = made()
    registry.register(AgeCollector(ages, role="decode"))
    ages.moved(ids(1), BlockState.FREE, BlockState.ACTIVE)
    clock.now += 0.2
    ages.moved(ids(1), BlockState.ACTIVE, BlockState.FREE)

    def sample(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(name, {"role": "decode", **labels})

    assert sample("sluice_kv_block_lifetime_seconds_bucket", tier="device", le="0.1") == 0
    assert sample("sluice_kv_block_lifetime_seconds_bucket", tier="device", le="0.5") == 1
    assert sample("sluice_kv_block_lifetime_seconds_count", tier="device") == 1
    assert sample("sluice_kv_block_idle_before_evict_seconds_count", tier="device") == 0
    for state in ("fenced", "quarantined"):
        assert sample("sluice_kv_block_withheld_seconds_count", state=state) == 0
        assert sample("sluice_kv_block_withheld_oldest_seconds", state=state) == 0
