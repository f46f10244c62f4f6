"""Evicting from a full prefix cache: our batch against a heap of nodes, on the same trees."""

import gc
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from time import thread_time
from typing import Protocol

import numpy as np

from bench.blocks_sluice import NAMESPACE, new_manager, new_owner
from bench.blocks_task import BLOCK_SIZE, PROMPT_TOKENS
from bench.figures import Figures
from bench.heap_per_node import HeapPerNodeCache, Node
from bench.measure import say
from blockmgr.block_manager import BlockManager
from blockmgr.pool import BlockObserver
from blockmgr.states import BlockState
from blockmgr.token_run import TokenRun
from core.ids import Owner

_SPEED_AIM = 10.0
_CHAIN_BLOCKS = 500
_FANOUT = 4
Path = tuple[int, ...]
"""The blocks of one sequence by number; equal numbers in equal places are equal content."""


def flat_path(serial: int) -> Path:
    """Return a sequence of one block that no other shares."""
    return (serial,)


def branching_path(serial: int) -> Path:
    """Return a sequence of four blocks; each of the first three has four successors."""
    tree, leaf = divmod(serial, _FANOUT**3)
    return tree, leaf // _FANOUT**2, leaf // _FANOUT % _FANOUT, leaf % _FANOUT


def chain_path(serial: int) -> Path:
    """Return a long sequence that no other shares: one compressed edge, or a node per block."""
    return (serial, *range(1, _CHAIN_BLOCKS))


SHAPES: dict[str, Callable[[int], Path]] = {
    "flat": flat_path,
    "branching": branching_path,
    "chains": chain_path,
}


class Cache(Protocol):
    """A full pool from which blocks are taken."""

    @property
    def num_free(self) -> int:
        """Blocks that are not cached."""
        ...

    def use(self, path: Path) -> object:
        """Let one sequence come and go: its blocks are cached then. Returns where."""
        ...

    def take(self, num_blocks: int) -> float:
        """Take blocks and give them back as free ones; return the seconds until all were had."""
        ...


class SluiceCache:
    """Our block manager."""

    def __init__(self, num_blocks: int, observers: tuple[BlockObserver, ...] = ()) -> None:
        self.blocks: BlockManager = new_manager(num_blocks, observers=observers)
        self._serials = count()

    @property
    def num_free(self) -> int:
        """Blocks that are not cached."""
        return self.blocks.counts()[BlockState.FREE]

    def use(self, path: Path) -> list[int]:
        """Let one sequence come and go; return its blocks."""
        owner, tokens = self._next_owner(), token_run(path)
        cached = self.blocks.count_cached_tokens(tokens)
        self.blocks.admit(owner, tokens=tokens, num_cached_tokens=cached, num_tokens=len(tokens))
        self.blocks.settle(owner, len(tokens))
        (table,) = self.blocks.block_tables(owner)
        block_ids: list[int] = table.tolist()
        self.blocks.release(owner)
        return block_ids

    def take(self, num_blocks: int) -> float:
        """Take blocks by one admission."""
        owner = self._next_owner()
        started = thread_time()
        self.blocks.admit(
            owner, tokens=None, num_cached_tokens=0, num_tokens=num_blocks * BLOCK_SIZE
        )
        ended = thread_time()
        self.blocks.release(owner)
        return ended - started

    def _next_owner(self) -> Owner:
        return new_owner(next(self._serials))


class HeapCache:
    """The peer."""

    def __init__(self, num_blocks: int) -> None:
        self.tree = HeapPerNodeCache(num_blocks)

    @property
    def num_free(self) -> int:
        """Blocks that are not cached."""
        return self.tree.num_free

    def use(self, path: Path) -> Node:
        """Let one sequence come and go; return its last node."""
        node = self.tree.insert(path)
        self.tree.release(node)
        return node

    def take(self, num_blocks: int) -> float:
        """Take blocks by one allocation."""
        started = thread_time()
        block_ids = self.tree.allocate(num_blocks)
        ended = thread_time()
        self.tree.give_back(block_ids)
        return ended - started


def token_run(path: Path) -> TokenRun:
    """Return tokens whose blocks differ exactly where the numbers of ``path`` do."""
    rest = [0] * (BLOCK_SIZE - 1)
    token_ids = [token for number in path for token in (number, *rest)]
    return TokenRun(NAMESPACE, BLOCK_SIZE, token_ids)


@dataclass(frozen=True, slots=True)
class EvictPlan:
    """How much is cached, evicted and repeated."""

    num_blocks: int = 100_000
    num_evicted: int = 10_000
    repeats: int = 7
    admissions: int = 300


@dataclass(slots=True)
class EvictResult:
    """What evictions gave."""

    figures: dict[str, Figures]
    ratios: dict[str, float]


def measure_evictions(plan: EvictPlan) -> EvictResult:
    """Measure batches of evictions from trees of every shape, and single admissions."""
    result = EvictResult({}, {})
    for shape, path_of in SHAPES.items():
        figures = _measure_batches(plan, path_of)
        result.figures[f"evict_{shape}"] = figures
        ours, theirs = figures["sluice_ms"], figures["heap_per_node_ms"]
        name = (
            f"evict {plan.num_evicted:,} of {plan.num_blocks:,} cached blocks, {shape}: "
            f"{_SPEED_AIM:g}x a heap of nodes"
        )
        result.ratios[name] = round(theirs / ours / _SPEED_AIM, 4)
        say(f"evict, {shape}: sluice {ours:.2f} ms, heap of nodes {theirs:.2f} ms")
    result.figures["admit_under_eviction"] = _measure_admissions(plan)
    return result


def _measure_batches(plan: EvictPlan, path_of: Callable[[int], Path]) -> Figures:
    """Return the median milliseconds of one eviction on each side.

    And the microseconds that a sequence takes to come and go, in the first filling of the pool and
    in those that follow an eviction: what an eviction leaves for later shows there.
    """
    caches: dict[str, Cache] = {
        "sluice": SluiceCache(plan.num_blocks),
        "heap_per_node": HeapCache(plan.num_blocks),
    }
    serials = {name: count() for name in caches}
    taken: dict[str, list[float]] = {name: [] for name in caches}
    filled: dict[str, list[float]] = {name: [] for name in caches}
    for _ in range(plan.repeats + 1):
        for name, cache in caches.items():
            filled[name].append(_fill(cache, path_of, serials[name]))
            gc.collect()
            taken[name].append(cache.take(plan.num_evicted))
    figures: Figures = {}
    for name in caches:  # the first round is a warm-up
        figures[f"{name}_ms"] = round(1e3 * statistics.median(taken[name][1:]), 3)
        figures[f"{name}_use_us_first"] = round(1e6 * filled[name][0], 2)
        figures[f"{name}_use_us_after"] = round(1e6 * statistics.median(filled[name][1:]), 2)
    return figures


def _fill(cache: Cache, path_of: Callable[[int], Path], serials: Iterator[int]) -> float:
    """Let sequences come and go until the next one might not find enough free blocks.

    Returns:
        The seconds that each took.
    """
    longest = len(path_of(0))
    started, num_used = thread_time(), 0
    while cache.num_free >= longest:
        cache.use(path_of(next(serials)))
        num_used += 1
    return (thread_time() - started) / max(num_used, 1)


def _measure_admissions(plan: EvictPlan) -> Figures:
    """Return percentiles of taking the blocks of one long prompt out of a full cache."""
    figures: Figures = {}
    caches: dict[str, Cache] = {
        "sluice": SluiceCache(plan.num_blocks),
        "heap_per_node": HeapCache(plan.num_blocks),
    }
    num_blocks = min(PROMPT_TOKENS // BLOCK_SIZE, plan.num_blocks)
    for name, cache in caches.items():
        serials = count()
        samples: list[float] = []
        for _ in range(plan.admissions):
            _fill(cache, flat_path, serials)
            samples.append(cache.take(num_blocks))
        median, tail = 1e6 * np.percentile(samples, [50, 99])
        figures |= {f"{name}_us_p50": round(median, 1), f"{name}_us_p99": round(tail, 1)}
    say(
        f"admit {num_blocks} blocks under eviction: p99 sluice "
        f"{figures['sluice_us_p99']:.0f} us, heap of nodes {figures['heap_per_node_us_p99']:.0f} us"
    )
    return figures
