"""What disaggregation adds to the time to the first token, for one long prompt on an idle machine.

The same deployment, one prefill and one decode worker, serves the same prompts three times: decode
prefills by itself; prefill does, and offers its layers in ranges while later ones compute; prefill
does, and offers the last chunk as a whole. What the second takes longer than the first is what
computation does not hide.
"""

import argparse
import json
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench import systems
from bench.figures import Figures
from bench.machine import describe_machine
from bench.measure import measure_served, say
from bench.process_tree import StartError, adopt_orphans
from bench.samples import LoadPlan
from deploy.model_source import cache_folder, resolve_model

LOCAL, REMOTE, WHOLE = "local", "remote", "remote-without-ranges"
MAX_SHARE = 0.05
"""Of the prefill time, added by its taking place elsewhere."""
_LEAST_SHARE = 0.0005
"""Less is not told from nothing."""
_EXIT_INTERRUPTED = 130
_NEVER_REMOTE = 2**30

_SECTIONS: Mapping[str, Mapping[str, Mapping[str, object]]] = {
    LOCAL: {"router": {"local_prefill_max_tokens": _NEVER_REMOTE}},
    REMOTE: {},
    WHOLE: {"transfer": {"layer_ranges": 1}},
}


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Return the command line's options, those of ``--quick`` where they are not given."""
    parser = argparse.ArgumentParser(prog="python -m bench.added_ttft", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few short prompts: about a minute")
    parser.add_argument("--prompt-tokens", type=int, help="default: 2048")
    parser.add_argument("--rounds", type=int, help="prompts per repeat; default: 5")
    parser.add_argument("--repeats", type=int, help="each figure is their median; default: 3")
    parser.add_argument("--model", default="default", help="folder, hub id or 'default'")
    arguments = parser.parse_args(argv)
    usual = (
        {"prompt_tokens": 512, "rounds": 2, "repeats": 1}
        if arguments.quick
        else {"prompt_tokens": 2048, "rounds": 5, "repeats": 3}
    )
    for name, value in usual.items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, value)
    return arguments


def measure(arguments: argparse.Namespace, logs: Path) -> tuple[dict[str, Figures], list[str]]:
    """Return the figures of each way that could be measured, and what is missing and why."""
    plan = LoadPlan(
        concurrency=(1,),
        prompt_tokens=arguments.prompt_tokens,
        output_tokens=2,
        repeats=arguments.repeats,
        rounds=arguments.rounds,
    )
    model = resolve_model(arguments.model).path
    figures: dict[str, Figures] = {}
    missing: list[str] = []
    for name, sections in _SECTIONS.items():
        system = systems.sluice(f"ttft-{name}", model, logs, prefill=1, sections=sections)
        try:
            result = measure_served(system, plan, logs)
        except StartError as error:
            missing.append(f"{name}: {error}")
            say(missing[-1])
            continue
        figures[name] = result.by_concurrency[1]
        missing += result.problems
    return figures, missing


def share_of(figures: Mapping[str, Figures], name: str) -> float | None:
    """Return what ``name`` adds to the median TTFT, as a share of what local prefill takes.

    None where one of the two is missing or a request failed.
    """
    local, other = figures.get(LOCAL, {}), figures.get(name, {})
    for side in (local, other):
        if side.get("failed_requests", 1) or "ttft_ms_p50" not in side:
            return None
    return other["ttft_ms_p50"] / local["ttft_ms_p50"] - 1


def report(
    figures: Mapping[str, Figures],
    missing: Sequence[str],
    machine: Mapping[str, object],
    parameters: Mapping[str, object],
) -> dict[str, object]:
    """Return the JSON object that the benchmark prints last."""
    share = share_of(figures, REMOTE)
    name = f"added TTFT, at most {MAX_SHARE:.0%} of the prefill time"
    shares = {side: share_of(figures, side) for side in (REMOTE, WHOLE)}
    return {
        "bench": "added_ttft",
        "ratios": {} if share is None else {name: round(MAX_SHARE / max(share, _LEAST_SHARE), 4)},
        "figures": {
            "parameters": dict(parameters),
            "added_share": {k: None if v is None else round(v, 4) for k, v in shares.items()},
            **{side: {k: round(v, 3) for k, v in f.items()} for side, f in figures.items()},
        },
        "machine": dict(machine),
        "missing": list(missing),
    }


def _print_table(figures: Mapping[str, Figures]) -> None:
    table = Table("prefill", "TTFT p50 ms", "p99", "added", title="Time to the first token")
    for name, found in figures.items():
        share = share_of(figures, name)
        cells = [f"{found[key]:.1f}" for key in ("ttft_ms_p50", "ttft_ms_p99") if key in found]
        table.add_row(name, *cells, "-" if share is None else f"{share:+.1%}")
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
        figures, missing = measure(arguments, logs)
    except KeyboardInterrupt:
        say("interrupted; everything that was started is stopped")
        return _EXIT_INTERRUPTED
    parameters = {
        name: getattr(arguments, name) for name in ("prompt_tokens", "rounds", "repeats", "model")
    }
    _print_table(figures)
    print(json.dumps(report(figures, missing, machine, parameters)), flush=True)
    return 0 if figures else 1


if __name__ == "__main__":
    sys.exit(main())
