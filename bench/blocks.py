"""What the block manager costs and keeps: a request's life, evictions, and a storm of requests.

``python -m bench.blocks`` measures vLLM's ``KVCacheManager`` in turn with ours, and a heap of nodes
beside our eviction. Progress goes to standard error; standard output ends with a table and, on its
last line, one JSON object.
"""

import argparse
import json
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rich.console import Console
from rich.table import Table

from bench import peers
from bench.blocks_draws import StormPlan
from bench.blocks_evict import EvictPlan, measure_evictions
from bench.blocks_leaks import measure_storm
from bench.blocks_life import LifeResult, PeerError, cases, measure_lives, vllm_side
from bench.figures import Figures
from bench.machine import describe_machine
from bench.measure import say
from deploy.model_source import cache_folder

QUICK_NOTE = "--quick: these sizes are too small to meet the aims of speed; leave it out for those"
PARTS = ("storm", "life", "evict")
"""In their order: the storm comes first, because it watches the memory of this process."""
_EXIT_INTERRUPTED = 130


@dataclass(slots=True)
class Results:
    """What was measured up to now."""

    lives: Mapping[str, Mapping[str, Figures]] = field(
        default_factory=dict[str, Mapping[str, Figures]]
    )
    evictions: Mapping[str, Figures] = field(default_factory=dict[str, Figures])
    storm: Figures = field(default_factory=dict[str, float])
    ratios: dict[str, float] = field(default_factory=dict[str, float])
    missing: list[str] = field(default_factory=list[str])


def _parts(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    unknown = [name for name in names if name not in PARTS]
    if unknown:
        raise argparse.ArgumentTypeError(f"unknown: {', '.join(unknown)}; of {', '.join(PARTS)}")
    return names


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not at least 1")
    return number


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Return the command line's options, those of ``--quick`` where they are not given."""
    parser = argparse.ArgumentParser(prog="python -m bench.blocks", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small pools: less than a minute")
    parser.add_argument("--parts", type=_parts, default=PARTS, help=f"of {','.join(PARTS)}")
    parser.add_argument("--pool-sizes", help="default: 10000,1000000", type=_sizes)
    parser.add_argument("--rounds", type=_positive, help="of 12 lives per side and case")
    parser.add_argument("--requests", type=_positive, help="of the storm; default: 1000000")
    parser.add_argument("--cached-blocks", type=_positive, help="to evict a tenth of")
    parser.add_argument("--no-peer", action="store_true", help="without vLLM")
    arguments = parser.parse_args(argv)
    usual: dict[str, object] = {
        "pool_sizes": (10_000,) if arguments.quick else (10_000, 1_000_000),
        "rounds": 3 if arguments.quick else 15,
        "requests": 20_000 if arguments.quick else 1_000_000,
        "cached_blocks": 10_000 if arguments.quick else 100_000,
    }
    for name, value in usual.items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, value)
    return arguments


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(_positive(part) for part in text.split(","))


def measure(arguments: argparse.Namespace) -> Results:
    """Measure the parts that were asked for, in their order."""
    results = Results()
    results.missing += [f"{part}: not asked for" for part in PARTS if part not in arguments.parts]
    if "storm" in arguments.parts:
        storm = measure_storm(StormPlan(arguments.requests))
        results.storm = storm.figures
        results.ratios |= storm.ratios
    if "life" in arguments.parts:
        lives = _measure_lives(arguments, results.missing)
        results.lives = lives.figures
        results.ratios |= lives.ratios
    if "evict" in arguments.parts:
        cached = arguments.cached_blocks
        plan = EvictPlan(cached, num_evicted=cached // 10, admissions=-(-cached // 300))
        evictions = measure_evictions(plan)
        results.evictions = evictions.figures
        results.ratios |= evictions.ratios
    return results


def _measure_lives(arguments: argparse.Namespace, missing: list[str]) -> LifeResult:
    all_cases = cases(arguments.pool_sizes)
    if arguments.no_peer or not peers.vllm_is_made():
        reason = "not asked for" if arguments.no_peer else "not made: python -m bench.peers"
        missing.append(f"vllm: {reason}")
        return measure_lives(all_cases, rounds=arguments.rounds, peer=None)
    logs = cache_folder() / "bench"
    logs.mkdir(parents=True, exist_ok=True)
    try:
        with vllm_side(logs / "blocks-vllm.log") as peer:
            return measure_lives(all_cases, rounds=arguments.rounds, peer=peer)
    except PeerError as error:
        missing.append(f"vllm: {error}")
        say(missing[-1])
        return measure_lives(all_cases, rounds=arguments.rounds, peer=None)


def report(
    results: Results, machine: Mapping[str, object], parameters: Mapping[str, object]
) -> dict[str, object]:
    """Return the JSON object that the benchmark prints last."""
    return {
        "bench": "blocks",
        "ratios": results.ratios,
        "figures": {
            "parameters": dict(parameters),
            "life": results.lives,
            "evict": results.evictions,
            "storm": results.storm,
        },
        "machine": dict(machine),
        "missing": results.missing,
    }


def _print_tables(results: Results, *, is_quick: bool) -> None:
    console = Console(width=120)
    lives = Table("case", "side", title="A request's life, median in us")
    columns = ("build", "admit", "append", "release", "manager", "whole")
    for column in columns:
        lives.add_column(column, justify="right")
    for case, sides in results.lives.items():
        for side, figures in sides.items():
            lives.add_row(case, side, *(f"{figures[f'{column}_us']:.1f}" for column in columns))
    console.print(lives)
    aims = Table("aim", title="Ratios: at least 1.0 meets the aim")
    aims.add_column("ratio", justify="right")
    for name, ratio in results.ratios.items():
        aims.add_row(name, f"{ratio:.2f}")
    console.print(aims)
    if is_quick:
        console.print(QUICK_NOTE, highlight=False)


def main() -> int:
    """Run the command line and return its exit code: 1 where a block was lost or released twice."""
    arguments = parse(sys.argv[1:])
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    machine = describe_machine()
    if not machine["alone"]:
        say(f"warning: other work takes {machine['busy_before']:.0%} of the CPUs")
    try:
        results = measure(arguments)
    except KeyboardInterrupt:
        say("interrupted; the peer's process is stopped")
        return _EXIT_INTERRUPTED
    names = ("pool_sizes", "rounds", "requests", "cached_blocks")
    _print_tables(results, is_quick=arguments.quick)
    parameters = {name: getattr(arguments, name) for name in names}
    print(json.dumps(report(results, machine, parameters)), flush=True)
    is_sound = not results.storm.get("leaked_blocks") and not results.storm.get("double_releases")
    return 0 if is_sound else 1


if __name__ == "__main__":
    sys.exit(main())
