"""The load of a decode worker is read by another thread while its scheduler works."""

import itertools
from collections.abc import Iterator

from core.messages import WorkerLoad
from core.worker_metrics import WorkerMetrics
from tests.decode.bench import Bench
from tests.scraping import scrape


def lives(bench: Bench) -> Iterator[None]:
    """Sequences come, begin to be computed, and go, for ever."""
    for at in itertools.count():
        owner = bench.add(f"{at}", 40, first=1000 * at).owner
        yield
        batch = bench.scheduler.schedule()
        yield
        bench.scheduler.abort(owner)
        yield
        if batch is not None:
            bench.complete(batch)
            yield


def test_a_scrape_is_whole_whatever_happens_during_it() -> None:
    bench = Bench(20)
    scheduler = bench.scheduler
    for at in range(3):
        bench.add(f"waiting-{at}", 200, first=5000 * (at + 1))
    changes = lives(bench)
    metrics = WorkerMetrics("decode")
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
