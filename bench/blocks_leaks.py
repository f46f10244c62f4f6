"""What the storm leaves behind, which should be nothing: blocks, second releases, memory."""

import sys
from dataclasses import dataclass
from time import thread_time

import psutil

from bench.blocks_draws import StormPlan
from bench.blocks_storm import Storm
from bench.figures import Figures
from bench.measure import say
from blockmgr.states import BlockState

_MEMORY_AIM = 1.05
"""Resident memory at the end is at most this many times that after a tenth of the requests: what
the C allocator keeps to itself moves it by a few percent where nothing is left behind."""
_ALLOCATIONS_AIM = 1.01
"""The same of Python's live allocations, which are exact."""
_MIB = 2**20


@dataclass(slots=True)
class StormResult:
    """What the storm gave."""

    figures: Figures
    ratios: dict[str, float]


def count_leaked(storm: Storm) -> int:
    """Return how many blocks do not come back once everything has ended and the cache is empty."""
    storm.blocks.check_invariants()
    storm.blocks.reset_cache()
    return storm.blocks.num_blocks - storm.blocks.counts()[BlockState.FREE]


def measure_storm(plan: StormPlan) -> StormResult:
    """Run the storm; the ratios are 0 where a block leaked or was released twice."""
    storm = Storm(plan)
    size, tenth = f"{plan.num_requests:,} requests", max(1, plan.num_requests // 10)
    resident: list[float] = []
    allocations: list[int] = []
    started = thread_time()
    for num_ended in storm.run():
        if num_ended >= (len(resident) + 1) * tenth:
            storm.blocks.check_invariants()
            resident.append(psutil.Process().memory_info().rss / _MIB)
            allocations.append(sys.getallocatedblocks())
            say(f"storm: {num_ended:,} requests, {resident[-1]:.0f} MiB")
    seconds = thread_time() - started
    resident.append(psutil.Process().memory_info().rss / _MIB)
    allocations.append(sys.getallocatedblocks())
    leaked = count_leaked(storm)
    stats = storm.blocks.stats
    figures: Figures = {
        "requests": storm.num_ended,
        "aborted": storm.num_aborted,
        "preempted": storm.num_preempted,
        "refused_admissions": storm.num_refused,
        "steps": storm.waits.steps,
        "us_per_request": round(1e6 * seconds / plan.num_requests, 1),
        "evictions": stats.evictions,
        "hit_share": round(stats.hit_tokens / max(stats.query_tokens, 1), 3),
        "deferred_releases": stats.deferred_releases,
        "leaked_blocks": leaked,
        "double_releases": stats.double_releases,
        "memory_mib_after_10_percent": round(resident[0], 1),
        "memory_mib_at_end": round(resident[-1], 1),
        "allocations_after_10_percent": allocations[0],
        "allocations_at_end": allocations[-1],
        **storm.waits.figures(),
    }
    ratios = {
        f"{size}: no block leaked": float(leaked == 0),
        f"{size}: no double release": float(stats.double_releases == 0),
        f"{size}: memory at the end at most {_MEMORY_AIM:g}x that after 10 %": round(
            _MEMORY_AIM * resident[0] / resident[-1], 4
        ),
        f"{size}: allocations at the end at most {_ALLOCATIONS_AIM:g}x those after 10 %": round(
            _ALLOCATIONS_AIM * allocations[0] / allocations[-1], 4
        ),
    }
    return StormResult(figures, ratios)
