"""The load of a worker is read by another thread while its scheduler works."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from core.ids import Owner
from core.messages import Role, WorkerLoad
from core.worker_metrics import WorkerMetrics
from tests.decode.bench import Bench as DecodeBench
from tests.prefill.bench import Bench as PrefillBench
from tests.scraping import scrape

NUM_BLOCKS = 20


def decode_side() -> tuple[
    DecodeBench, Callable[[str, int, int], Owner], Callable[[Owner], object]
]:
    """Return the bench, and how a prompt of some length and first token comes and goes."""
    bench = DecodeBench(NUM_BLOCKS)
    return (
        bench,
        lambda name, length, first: bench.add(name, length, first=first).owner,
        bench.scheduler.abort,
    )


def prefill_side() -> tuple[
    PrefillBench, Callable[[str, int, int], Owner], Callable[[Owner], object]
]:
    """Return the same of prefill."""
    bench = PrefillBench(NUM_BLOCKS)
    return (
        bench,
        lambda name, length, first: bench.add(name, length, salt=first),
        bench.scheduler.cancel,
    )


@pytest.mark.parametrize(
    ("role", "make_side"),
    [("decode", decode_side), ("prefill", prefill_side)],
    ids=["decode", "prefill"],
)
def test_a_scrape_of_the_load_is_whole_whatever_happens_during_it(
    role: Role, make_side: Callable[[], Any]
) -> None:
    bench, add, end = make_side()
    scheduler = bench.scheduler

    def lives() -> Iterator[None]:
        """Sequences come, begin to be computed, and go, for ever."""
        for at in itertools.count():
            owner = add(f"{at}", 40, 1000 * at)
            yield
            batch = scheduler.schedule()
            yield
            end(owner)
            yield
            if batch is not None:
                bench.complete(batch)
                yield

    for at in range(3):
        add(f"waiting-{at}", 200, 5000 * (at + 1))
    changes = lives()
    metrics = WorkerMetrics(role)
    metrics.export_load(
        lambda: WorkerLoad(
            running=scheduler.num_running,
            waiting=scheduler.num_waiting,
            queued_tokens=scheduler.num_queued_tokens,
            free_blocks=bench.blocks.num_allocatable,
            total_blocks=bench.blocks.num_blocks,
        )
    )

    assert "sluice_queued_tokens" in scrape(metrics.registry, lambda: next(changes))
