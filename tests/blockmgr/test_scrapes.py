"""Metrics are read by another thread, at any moment: they must come whole, and from the start on.

A scrape that meets a change of the dictionary it walks answers 500. Dashboards then have a gap just
while the tiers work, and a rate over a series that appears with its first event misses that event.
"""

import itertools
from collections.abc import Iterator

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from blockmgr.metrics import BlockCollector
from blockmgr.tier_metrics import TierCollector
from core.kv_layout import KVGroup
from core.tiers import Find
from tests.blockmgr.tier_world import SIZE, TierWorld
from tests.blockmgr.words import owner_of, run_of
from tests.scraping import scrape


def registry_of(world: TierWorld) -> CollectorRegistry:
    registry = CollectorRegistry()
    hits = world.book.stats.hit_tokens
    registry.register(BlockCollector(world.blocks, role="decode", lower_hit_tokens=hits))
    registry.register(TierCollector(world.book, role="decode"))
    return registry


def series_of(world: TierWorld) -> set[str]:
    lines = generate_latest(registry_of(world)).decode().splitlines()
    return {line.rpartition(" ")[0] for line in lines if line[0] != "#"}


def lives(world: TierWorld) -> Iterator[None]:
    """Requests through all tiers for ever, a few changes at a time."""
    for at in itertools.count():
        name, tokens = f"{at}", range(100 * (at % 7), 100 * (at % 7) + 3 * SIZE + 1)
        owner = owner_of(name)
        world.tiers.fetch(owner, run_of(tokens, SIZE), 3 * SIZE)
        world.collect()
        yield
        while world.tiers.is_fetching(owner):
            world.perform(next(iter(world.pending)), failed=at % 5 == 0)
            yield
        world.serve(name, tokens)
        yield
        while len(world.pending) > 2:
            failed = at % 11 == 0
            finds = [op for op, action in world.pending.items() if isinstance(action, Find)]
            world.perform((finds or list(world.pending))[0], failed=failed)
            yield
        if at % 13 == 0:
            world.reset()


def test_a_scrape_is_whole_whatever_happens_during_it() -> None:
    world = TierWorld(
        12, KVGroup(layers=(0,)), num_slots=16, max_copied=4, max_staged=6, zero_on_allocate=True
    )
    changes = lives(world)

    text = scrape(registry_of(world), lambda: next(changes))

    # Much has happened, and no gauge was below zero
    stats = world.book.stats
    assert min(stats.stores["done"], stats.reads["done"], stats.hit_tokens["host"]) > 0
    values = [float(line.split()[-1]) for line in text.splitlines() if line[0] != "#"]
    assert min(values) >= 0
    world.perform_all()
    world.check()


def test_every_series_is_there_before_its_first_event_and_no_other_comes() -> None:
    world = TierWorld(12, num_slots=16, max_copied=4, max_staged=6)
    before = series_of(world)
    for name in (
        'sluice_kv_tier_stores_total{result="failed",role="decode",tier="storage"}',
        'sluice_kv_tier_fetches_total{result="done",role="decode",tier="host"}',
        'sluice_kv_tier_lookups_total{result="missed",role="decode",tier="storage"}',
        'sluice_prefix_cache_hit_tokens_total{role="decode",tier="host"}',
    ):
        assert name in before

    changes = lives(world)
    for _ in range(2000):
        next(changes)

    assert series_of(world) == before
    world.perform_all()


def test_pins_are_counted_where_they_begin_and_end() -> None:
    # Given content that is stored, loaded twice at once, written down, and forgotten meanwhile
    world = TierWorld(12, num_slots=16, max_staged=6)
    host = world.book.host
    world.serve("A", range(2 * SIZE + 1))
    assert host.num_pinned == 2
    world.perform_all()
    assert host.num_pinned == 0
    world.serve("flush", range(900, 900 + 11 * SIZE + 1))
    world.perform_all()
    first = world.admit("B", range(2 * SIZE + 1))
    second = world.admit("C", range(2 * SIZE + 1))
    assert first is not None
    assert second is not None
    assert host.num_pinned == 2
    world.perform(first)
    assert host.num_pinned == 2
    world.reset()
    assert host.num_pinned == 2
    world.perform(second)
    assert host.num_pinned == 0
    world.perform_all()
    world.take_loads()
    world.check()


def test_a_count_of_pins_that_drifts_is_found() -> None:
    world = TierWorld(12)
    world.serve("A", range(2 * SIZE + 1))
    world.perform_all()
    (entry, _) = world.book.host.take(
        [world.book.name(0, digest) for digest in run_of(range(2 * SIZE), SIZE).digests(2)]
    )
    entry.pins = 0
    with pytest.raises(AssertionError):
        world.book.host.check_invariants()


def test_an_owner_of_two_fetches_is_found() -> None:
    # Given two fetches, when the older one also knows the owner of the newer
    world = TierWorld(12, max_staged=6)
    for name, first in (("A", 0), ("B", 500)):
        world.tiers.fetch(owner_of(name), run_of(range(first, first + 13), SIZE), 3 * SIZE)
    storage = world.book.storage
    assert storage is not None
    storage.check_invariants()
    older = next(iter(storage._fetches.values()))
    older.owners.add(owner_of("B"))

    # Then the books do not pass for consistent
    with pytest.raises(AssertionError):
        storage.check_invariants()
