"""How fast KV gets from one process to another, against what the same machine does without us.

Sizes of a request from 16 KB to 64 MB, its blocks adjacent or scattered, over shared memory and
over TCP. The peers, in the same run: a copy out of shared memory, NIXL and ``ucp_get`` used
directly.
"""

import argparse
import json
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

from rich.console import Console
from rich.table import Table

from bench.machine import describe_machine
from bench.measure import say
from bench.transfer_direct import Direct, SharedCopy
from bench.transfer_memory import CASES, POOL_NBYTES, SCRATCH_NBYTES, Bytes, Case, allocate, share
from bench.transfer_ours import Ours
from bench.transfer_pairs import FAILURES, MAX_BATCH, Pair, Side, open_pair, reader, take_turns

_EXIT_INTERRUPTED = 130
_PATHS: Mapping[str, Mapping[str, str]] = {"shared memory": {}, "tcp": {"TLS": "tcp"}}
_TRANSPORTS = ("ucx", "nixl")
_LARGE_NBYTES = 256 * 1024
"""From here on the link's speed is asked for; below, the time of the software."""
_LEAST_SHARE = 0.9
_MAX_REQUEST_US = 100.0
_MAX_DESCRIPTOR_US = 2.0
_MAX_IDLE_SHARE = 0.001
_IDLE_S = 2.0
_TINY = Case(256 * 4096, 4096, "scattered")
"""Descriptors of a page each: little to copy, much to describe."""

Seconds = dict[str, dict[str, float]]
"""Median time of one request, by case and by side."""


@dataclass(slots=True)
class Results:
    """What was measured."""

    seconds: dict[str, Seconds] = field(default_factory=dict[str, Seconds])
    """By path."""
    figures: dict[str, float] = field(default_factory=dict[str, float])
    paths: dict[str, str] = field(default_factory=dict[str, str])
    missing: list[str] = field(default_factory=list[str])
    wrong: list[str] = field(default_factory=list[str])
    """Where other bytes came than were sent."""


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Return the command line's options, those of ``--quick`` where they are not given."""
    parser = argparse.ArgumentParser(prog="python -m bench.transfer", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rounds: less than a minute")
    parser.add_argument("--rounds", type=int, help="of each case and side; default: 15")
    parser.add_argument("--paths", type=_paths, default=tuple(_PATHS), help="default: all")
    arguments = parser.parse_args(argv)
    if arguments.rounds is None:
        arguments.rounds = 3 if arguments.quick else 15
    return arguments


def _paths(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    unknown = [name for name in names if name not in _PATHS]
    if unknown:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(_PATHS)}")
    return names


def measure(arguments: argparse.Namespace, results: Results) -> None:
    """Measure every path that was asked for."""
    pool = allocate(POOL_NBYTES + SCRATCH_NBYTES)
    memory, shared = share()
    for path in arguments.paths:
        with ExitStack() as stack:
            pairs = list(_open_pairs(stack, path, pool, memory, results))
            results.seconds[path] = {
                case.name: _measure_case(
                    case, pairs, SharedCopy(pool, shared), path, arguments.rounds, results
                )
                for case in CASES
            }
            if path == "shared memory":
                for pair in pairs:
                    _measure_software(pair, arguments.rounds, results)


def _open_pairs(
    stack: ExitStack, path: str, pool: Bytes, memory: str, results: Results
) -> Iterator[Pair]:
    for transport in _TRANSPORTS:
        try:
            yield stack.enter_context(
                open_pair(transport, pool, _PATHS[path], memory, results.missing)
            )
        except FAILURES as error:
            _miss(results, f"{transport} over {path}", error)


def _measure_case(
    case: Case, pairs: Sequence[Pair], copy: Direct, path: str, rounds: int, results: Results
) -> dict[str, float]:
    """Return the median time of each side; all take turns. The bytes are compared afterwards."""
    readers: dict[str, tuple[Pair, Ours]] = {}
    for pair in pairs:
        try:
            readers[pair.transport] = (pair, pair.ours(case.block_nbytes))
        except FAILURES as error:
            _miss(results, f"{pair.transport} over {path}", error)
    sides = {"copy": Side(reader(copy, case))}
    for pair, ours in readers.values():
        results.paths[f"{pair.transport} over {path}"] = ours.path()
        sides.update(pair.sides(ours, case))
    found = take_turns(
        sides, rounds, lambda side, error: _miss(results, f"{side} over {path}", error)
    )
    for name, (pair, ours) in readers.items():
        try:
            if name in found and not pair.is_right(ours, case):
                results.wrong.append(f"{name} over {path}: {case.name}")
        except FAILURES as error:
            _miss(results, f"{name} over {path}", error)
        ours.close()
    shown = ", ".join(f"{side} {_gb_s(case, time_s):.2f}" for side, time_s in found.items())
    say(f"  {path}: {case.name}: GB/s: {shown}")
    return found


def _miss(results: Results, what: str, error: Exception) -> None:
    results.missing.append(f"{what}: {error}")
    say(results.missing[-1])


def _measure_software(pair: Pair, rounds: int, results: Results) -> None:
    """Measure the shortest times of reads of pages, and what an idle pair takes of the CPUs."""
    ours = pair.ours(_TINY.block_nbytes)
    one = replace(_TINY, nbytes=_TINY.block_nbytes)
    times = {
        case.num_blocks: min(ours.time_of(case) for _ in range(MAX_BATCH * rounds))
        for case in (one, _TINY)
    }
    per_descriptor = (times[_TINY.num_blocks] - times[1]) / (_TINY.num_blocks - 1)
    results.figures[f"{pair.transport} request us"] = 1e6 * (times[1] - per_descriptor)
    results.figures[f"{pair.transport} descriptor us"] = 1e6 * per_descriptor
    pair.source.ask("idle")
    before = float(pair.source.ask("usage"))
    mine = ours.idle_cpu_s(_IDLE_S)
    theirs = float(pair.source.ask("usage")) - before
    results.figures[f"{pair.transport} idle share"] = max(mine, theirs) / _IDLE_S
    ours.close()


def _gb_s(case: Case, seconds: float) -> float:
    return case.nbytes / seconds / 1e9


def ratios_of(results: Results) -> dict[str, float]:
    """Return the aims' ratios; those of what is missing are absent."""
    found: dict[str, float] = {}
    for path, seconds in results.seconds.items():
        for case in CASES:
            times = seconds[case.name]
            peers = [side for side in times if side.endswith("direct")]
            if path == "shared memory":
                peers.append("copy")
            if case.nbytes < _LARGE_NBYTES or "ucx" not in times or not peers:
                continue
            best = min(times[side] for side in peers if side in times)
            name = f"{case.name} over {path}: at least {_LEAST_SHARE} of the best peer's speed"
            found[name] = round(best / times["ucx"] / _LEAST_SHARE, 4)
    bounds = {
        "ucx request us": ("software of one request, at most 100 us", _MAX_REQUEST_US),
        "ucx descriptor us": ("software of one descriptor, at most 2 us", _MAX_DESCRIPTOR_US),
        "ucx idle share": ("CPU of an idle pair, none", _MAX_IDLE_SHARE),
    }
    for figure, (name, bound) in bounds.items():
        if figure in results.figures:
            found[name] = round(bound / max(results.figures[figure], bound / 1000), 4)
    return found


def report(
    results: Results, machine: Mapping[str, object], parameters: Mapping[str, object]
) -> dict[str, object]:
    """Return the JSON object that the benchmark prints last."""
    microseconds = {
        path: {
            case: {side: round(1e6 * time_s, 2) for side, time_s in times.items()}
            for case, times in seconds.items()
        }
        for path, seconds in results.seconds.items()
    }
    return {
        "bench": "transfer",
        "ratios": ratios_of(results),
        "figures": {
            "parameters": dict(parameters),
            "time_to_last_byte_us": microseconds,
            "software": {name: round(value, 4) for name, value in results.figures.items()},
            "paths": results.paths,
            "wrong_bytes": results.wrong,
        },
        "machine": dict(machine),
        "missing": results.missing,
    }


def _print_tables(results: Results) -> None:
    console = Console(width=120)
    for path, seconds in results.seconds.items():
        sides = sorted({side for times in seconds.values() for side in times})
        table = Table("request", title=f"GB/s over {path} (time to the last byte)")
        for side in sides:
            table.add_column(side, justify="right")
        for case in CASES:
            times = seconds[case.name]
            table.add_row(case.name, *(_cell(case, times.get(side)) for side in sides))
        console.print(table)
    software = Table("software", "value", title="What a request and a descriptor cost; idle")
    for name, value in results.figures.items():
        software.add_row(name, f"{value:.3f}")
    console.print(software)
    aims = Table("aim", title="Ratios: at least 1.0 meets the aim")
    aims.add_column("ratio", justify="right")
    for name, ratio in ratios_of(results).items():
        aims.add_row(name, f"{ratio:.2f}")
    console.print(aims)


def _cell(case: Case, seconds: float | None) -> str:
    return "-" if seconds is None else f"{_gb_s(case, seconds):.2f} ({1e6 * seconds:.0f} us)"


def main() -> int:
    """Run the command line and return its exit code: 1 where a wrong byte came."""
    arguments = parse(sys.argv[1:])
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    machine = describe_machine()
    if not machine["alone"]:
        say(f"warning: other work takes {machine['busy_before']:.0%} of the CPUs")
    results = Results()
    try:
        measure(arguments, results)
    except KeyboardInterrupt:
        say("interrupted")
        return _EXIT_INTERRUPTED
    _print_tables(results)
    parameters = {"rounds": arguments.rounds, "paths": list(arguments.paths)}
    print(json.dumps(report(results, machine, parameters)), flush=True)
    return 1 if results.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
