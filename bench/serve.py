"""Output tokens per second, TTFT and ITL of this deployment and its peers: one load, one machine.

``python -m bench.serve`` starts each system in turn, alone, and stops it completely. Progress goes
to standard error; standard output ends with a table and, on its last line, one JSON object.
"""

import argparse
import json
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench import peers, systems
from bench.aims import SERVE_AIMS
from bench.figures import Figures, ratios
from bench.machine import describe_machine
from bench.measure import Result, measure_served, measure_transformers, say
from bench.process_tree import StartError, adopt_orphans
from bench.samples import LoadPlan
from deploy.model_source import cache_folder, resolve_model

SYSTEMS = ("sluice-1p1d", "sluice-colocated", "transformers", "vllm", "vllm-1p1d")
_DEFAULT_SYSTEMS = SYSTEMS[:4]
_EXIT_INTERRUPTED = 130
_COLUMNS = (
    ("output_tok_s", "out tok/s"),
    ("ttft_ms_p50", "TTFT p50"),
    ("ttft_ms_p99", "TTFT p99"),
    ("itl_ms_p50", "ITL p50"),
    ("itl_ms_p99", "ITL p99"),
    ("tpot_ms_p50", "TPOT p50"),
    ("tokens_per_event", "tok/event"),
    ("failed_requests", "failed"),
)


def _names(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    unknown = [name for name in names if name not in SYSTEMS]
    if unknown:
        raise argparse.ArgumentTypeError(f"unknown: {', '.join(unknown)}; of {', '.join(SYSTEMS)}")
    return names


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not at least 1")
    return number


def _levels(text: str) -> tuple[int, ...]:
    return tuple(_positive(part) for part in text.split(","))


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Return the command line's options, those of ``--quick`` where they are not given."""
    parser = argparse.ArgumentParser(prog="python -m bench.serve", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="ours only, small: about a minute")
    parser.add_argument("--systems", type=_names, help=f"of {','.join(SYSTEMS)}")
    parser.add_argument("--concurrency", type=_levels, help="default: 1,8,32")
    parser.add_argument("--prompt-tokens", type=_positive, help="default: 512")
    parser.add_argument("--output-tokens", type=_positive, help="default: 128")
    parser.add_argument("--repeats", type=_positive, help="each figure is their median; default: 3")
    parser.add_argument("--rounds", type=_positive, help="requests per client and repeat")
    parser.add_argument("--model", default="default", help="folder, hub id or 'default'")
    arguments = parser.parse_args(argv)
    usual: dict[str, object] = (
        {"systems": SYSTEMS[:2], "concurrency": (1, 8), "prompt_tokens": 128, "output_tokens": 32}
        if arguments.quick
        else {
            "systems": _DEFAULT_SYSTEMS,
            "concurrency": (1, 8, 32),
            "prompt_tokens": 512,
            "output_tokens": 128,
        }
    )
    usual |= {"repeats": 1, "rounds": 1} if arguments.quick else {"repeats": 3}
    for name, value in usual.items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, value)
    return arguments


def _measurements(model: Path, plan: LoadPlan, logs: Path) -> Mapping[str, Callable[[], Result]]:
    cores = sorted(os.sched_getaffinity(0))
    return {
        "sluice-1p1d": lambda: measure_served(
            systems.sluice("sluice-1p1d", model, logs, prefill=1), plan, logs
        ),
        "sluice-colocated": lambda: measure_served(
            systems.sluice("sluice-colocated", model, logs, prefill=0), plan, logs
        ),
        "transformers": lambda: measure_transformers(model, plan, logs),
        "vllm": lambda: measure_served(_made(systems.vllm(model)), plan, logs),
        "vllm-1p1d": lambda: measure_served(
            _made(systems.vllm_1p1d(model, cores=cores)), plan, logs
        ),
    }


def _made(system: systems.ServedSystem) -> systems.ServedSystem:
    if not peers.vllm_is_made():
        raise StartError("its environment is not made: python -m bench.peers")
    return system


def measure(arguments: argparse.Namespace, logs: Path) -> tuple[dict[str, Result], list[str]]:
    """Return the result of each system that could be measured, and what is missing and why."""
    plan = LoadPlan(
        concurrency=arguments.concurrency,
        prompt_tokens=arguments.prompt_tokens,
        output_tokens=arguments.output_tokens,
        repeats=arguments.repeats,
        rounds=arguments.rounds,
    )
    measurements = _measurements(resolve_model(arguments.model).path, plan, logs)
    results: dict[str, Result] = {}
    missing: list[str] = []
    for name in SYSTEMS:
        if name not in arguments.systems:
            missing.append(f"{name}: not asked for")
            continue
        try:
            results[name] = measurements[name]()
        except StartError as error:
            missing.append(f"{name}: {error}")
            say(missing[-1])
        else:
            missing += results[name].problems
    return results, missing


def report(
    results: Mapping[str, Result],
    missing: Sequence[str],
    machine: Mapping[str, object],
    parameters: Mapping[str, object],
) -> dict[str, object]:
    """Return the JSON object that the benchmark prints last."""
    return {
        "bench": "serve",
        "ratios": ratios(
            SERVE_AIMS, {name: result.by_concurrency for name, result in results.items()}
        ),
        "figures": {
            "parameters": dict(parameters),
            **{
                name: {
                    **{f"c{c}": _rounded(figures) for c, figures in result.by_concurrency.items()},
                    "processes": _rounded(result.processes),
                }
                for name, result in results.items()
            },
        },
        "machine": dict(machine),
        "missing": list(missing),
    }


def _rounded(figures: Figures) -> Figures:
    return {name: round(value, 3) for name, value in figures.items()}


def _print_table(results: Mapping[str, Result]) -> None:
    table = Table("system", "c", title="Times in ms")
    for _, heading in _COLUMNS:
        table.add_column(heading, justify="right", no_wrap=True)
    for name, result in results.items():
        for concurrency, figures in result.by_concurrency.items():
            cells = [
                f"{figures[key]:.2f}".removesuffix(".00") if key in figures else "-"
                for key, _ in _COLUMNS
            ]
            table.add_row(name, str(concurrency), *cells)
    Console(width=120).print(table)


def main() -> int:
    """Run the command line and return its exit code."""
    arguments = parse(sys.argv[1:])
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    adopt_orphans()
    logs = cache_folder() / "bench"
    logs.mkdir(parents=True, exist_ok=True)
    machine = describe_machine()
    if not machine["alone"]:
        say(f"warning: other work takes {machine['busy_before']:.0%} of the CPUs")
    try:
        results, missing = measure(arguments, logs)
    except KeyboardInterrupt:
        say("interrupted; everything that was started is stopped")
        return _EXIT_INTERRUPTED
    parameters = {
        name: getattr(arguments, name)
        for name in ("concurrency", "prompt_tokens", "output_tokens", "repeats", "rounds", "model")
    }
    _print_table(results)
    print(json.dumps(report(results, missing, machine, parameters)), flush=True)
    return 0 if results else 1


if __name__ == "__main__":
    sys.exit(main())
