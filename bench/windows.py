"""What recycling the blocks behind windows is worth: the same model, memory and load, on and off.

``python -m bench.windows`` gives two thirds of the KV heads of a model a short window and serves a
closed loop twice through a decode worker's own scheduler, block manager and engine: once with the
blocks behind the windows released, once with all of them kept to the end. Attention reads the same
in both. Progress goes to standard error; standard output ends with a table and, on its last line,
one JSON object.
"""

import argparse
import json
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench.figures import Aim, Figures, combine, ratios
from bench.machine import describe_machine
from bench.measure import say
from bench.windows_blocks import resident_blocks, transfer_figures
from bench.windows_serving import Service, ServingPlan, ServingRun, keep_everything
from core.config import SluiceConfig
from deploy.model_source import resolve_model
from engine.startup import GIB, start_engine

ON, OFF = "recycling", "keeping"
SPAN_TOKENS, SINK_TOKENS, HEAD_RATIO = 64, 16, 2 / 3
MAX_BATCH_TOKENS = 128
"""Of a step: a fourth of a prompt, as a chunk of 2,048 is of 8,192."""
_EXIT_INTERRUPTED = 130
_EXPLAINING = ("pruned_blocks", "lost_blocks", "preemptions", "sequences_per_step")
_COLUMNS = ("output_tok_s", "ttft_ms_p50", "ttft_ms_p99", "itl_ms_p50", *_EXPLAINING)


@dataclass(slots=True)
class Results:
    """What was measured up to now."""

    serving: dict[str, list[Figures]] = field(default_factory=dict[str, list[Figures]])
    """Per side, one entry per repeat."""
    equal_outputs: list[bool] = field(default_factory=list[bool])
    """Per request, whether both sides said the same."""
    resident: dict[int, list[int]] = field(default_factory=dict[int, list[int]])
    transfer: dict[str, Figures] = field(default_factory=dict[str, Figures])
    is_windowed: list[bool] = field(default_factory=list[bool])
    """Per group of the layout."""


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not at least 1")
    return number


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Return the command line's options, those of ``--quick`` where they are not given."""
    parser = argparse.ArgumentParser(prog="python -m bench.windows", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="short sequences: under a minute")
    parser.add_argument("--prompt-tokens", type=_positive, help="default: 512")
    parser.add_argument("--output-tokens", type=_positive, help="default: 256")
    parser.add_argument("--clients", type=_positive, default=6)
    parser.add_argument("--rounds", type=_positive, help="requests of each client; default: 4")
    parser.add_argument("--repeats", type=_positive, help="each figure is their median; default: 2")
    parser.add_argument(
        "--whole-sequences",
        type=float,
        default=2.25,
        help="size of the pool, in sequences of which every block is kept",
    )
    parser.add_argument("--longest", type=_positive, help="tokens; default: 131072")
    parser.add_argument(
        "--own-windows", action="store_true", help="the model's, instead of windows of heads"
    )
    parser.add_argument("--model", default="default", help="folder, hub id or 'default'")
    arguments = parser.parse_args(argv)
    usual: dict[str, int] = (
        {"prompt_tokens": 256, "output_tokens": 128, "rounds": 2, "repeats": 1, "longest": 16_384}
        if arguments.quick
        else {
            "prompt_tokens": 512,
            "output_tokens": 256,
            "rounds": 4,
            "repeats": 2,
            "longest": 131_072,
        }
    )
    for name, value in usual.items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, value)
    return arguments


def make_config(arguments: argparse.Namespace, model: Path) -> SluiceConfig:
    """Return the config of the worker that both sides are."""
    sequence_tokens = arguments.prompt_tokens + arguments.output_tokens
    pool_nbytes = arguments.whole_sequences * sequence_tokens * _token_nbytes(model)
    window = {"window": SPAN_TOKENS, "sink": SINK_TOKENS, "ratio": HEAD_RATIO}
    return SluiceConfig.parse(
        {
            "cache": {"memory_gib": pool_nbytes / GIB},
            "scheduler": {"max_batch_tokens": MAX_BATCH_TOKENS},
            "engine": {"num_threads": 1},
            "kv_groups": {} if arguments.own_windows else {"head_window": window},
        },
        source="bench.windows",
    )


def _token_nbytes(model: Path) -> int:
    """Return the bytes of one token's bfloat16 K and V."""
    config: dict[str, int] = json.loads((model / "config.json").read_text(encoding="utf-8"))
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return config["num_hidden_layers"] * 2 * config["num_key_value_heads"] * head_dim * 2


def measure(arguments: argparse.Namespace, results: Results) -> None:
    """Serve every repeat on both sides in turn, and count what needs no model."""
    model = resolve_model(arguments.model).path
    config = make_config(arguments, model)
    say(f"loading {model.name}")
    engine = start_engine(model, config)
    layout = engine.layout
    results.is_windowed = [group.window is not None for group in layout.groups]
    plan = ServingPlan(
        clients=arguments.clients,
        rounds=arguments.rounds,
        prompt_tokens=arguments.prompt_tokens,
        output_tokens=arguments.output_tokens,
    )
    sides = {ON: layout, OFF: keep_everything(layout)}
    for repeat in range(arguments.repeats):
        runs: dict[str, ServingRun] = {}
        for side, seen in sides.items():
            seed = f"windows/{repeat}"
            runs[side] = Service(engine, seen, config.scheduler, plan, seed=seed).run()
            results.serving.setdefault(side, []).append(runs[side].figures())
            say(f"{side}: {_brief(results.serving[side][-1])}")
        answers = runs[OFF].outputs
        results.equal_outputs += [answers[name] == out for name, out in runs[ON].outputs.items()]
    longest = arguments.longest
    say(f"following one sequence to {longest} tokens")
    results.resident = resident_blocks(layout, [longest >> shift for shift in (6, 4, 2, 0)])
    results.transfer = transfer_figures(layout, [arguments.prompt_tokens, longest // 4, longest])


def _brief(figures: Figures) -> str:
    return ", ".join(f"{name} {figures[name]:.1f}" for name in _COLUMNS if name in figures)


def aims(clients: int) -> tuple[Aim, ...]:
    """Return what recycling must reach."""
    return (
        Aim(
            name="output tok/s, at least 1.6 times that without recycling",
            system=ON,
            peer=OFF,
            concurrency=clients,
            figure="output_tok_s",
            factor=1.6,
            better="higher",
        ),
        Aim(
            name="TTFT p99, at most half of that without recycling",
            system=ON,
            peer=OFF,
            concurrency=clients,
            figure="ttft_ms_p99",
            factor=0.5,
            better="lower",
        ),
    )


def ratios_of(results: Results, clients: int) -> dict[str, float]:
    """Return the aims' ratios, and 1.0 or 0.0 for what must be so for them to mean anything."""
    sides = {side: combine_all(repeats) for side, repeats in results.serving.items()}
    found = ratios(aims(clients), {side: {clients: figures} for side, figures in sides.items()})
    return found | _oracles(results, sides)


def report(
    results: Results,
    found: Mapping[str, float],
    machine: Mapping[str, object],
    parameters: Mapping[str, object],
) -> dict[str, object]:
    """Return the JSON object that the benchmark prints last."""
    sides = {side: combine_all(repeats) for side, repeats in results.serving.items()}
    return {
        "bench": "windows",
        "ratios": dict(found),
        "figures": {
            "parameters": dict(parameters),
            **{side: {name: round(at, 3) for name, at in f.items()} for side, f in sides.items()},
            "resident_blocks": {str(length): held for length, held in results.resident.items()},
            "transfer": results.transfer,
        },
        "machine": dict(machine),
        "missing": [],
    }


def combine_all(repeats: Sequence[Figures]) -> Figures:
    """Return the median of each figure; blocks and preemptions are added up."""
    totals = {
        name: sum(figures[name] for figures in repeats)
        for name in ("pruned_blocks", "lost_blocks", "preemptions")
    }
    return combine(repeats) | totals


def _oracles(results: Results, sides: Mapping[str, Figures]) -> dict[str, float]:
    """Return 1.0 for each thing that must be so for the figures to mean anything, else 0.0."""
    windowed = [
        [count for count, has_window in zip(held, results.is_windowed, strict=True) if has_window]
        for held in results.resident.values()
    ]
    has_recycled = sides[ON]["pruned_blocks"] > 0 and sides[OFF]["pruned_blocks"] == 0
    return {
        "blocks were released behind windows, on one side only": float(has_recycled),
        "no block was lost": float(not any(f["lost_blocks"] for f in sides.values())),
        "both sides said the same": float(all(results.equal_outputs)),
        "a windowed group holds as much of a long sequence as of a longer one": float(
            bool(windowed) and all(held == windowed[-1] for held in windowed[-2:])
        ),
    }


def _print_tables(results: Results, found: Mapping[str, float]) -> None:
    console = Console(width=120)
    serving = Table("blocks behind windows:", *results.serving, title="CPU time of one core")
    sides = [combine_all(repeats) for repeats in results.serving.values()]
    for column in _COLUMNS:
        serving.add_row(column, *(f"{figures[column]:.1f}" for figures in sides))
    console.print(serving)
    resident = Table("tokens", "blocks of each group", "KV bytes sent", "without windows")
    for length, held in results.resident.items():
        sent = results.transfer.get(str(length), {})
        cells = [f"{sent[name]:.0f}" for name in ("kv_nbytes", "kv_nbytes_whole") if sent]
        resident.add_row(str(length), str(held), *cells)
    console.print(resident)
    table = Table("aim", title="Ratios: at least 1.0 meets the aim")
    table.add_column("ratio", justify="right")
    for name, ratio in found.items():
        table.add_row(name, f"{ratio:.2f}")
    console.print(table)


def main() -> int:
    """Run the command line and return its exit code: 1 where an oracle failed."""
    arguments = parse(sys.argv[1:])
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    machine = describe_machine()
    results = Results()
    try:
        measure(arguments, results)
    except KeyboardInterrupt:
        say("interrupted")
        return _EXIT_INTERRUPTED
    parameters = {name: value for name, value in vars(arguments).items() if name != "quick"}
    parameters |= {"window": SPAN_TOKENS, "sinks": SINK_TOKENS, "head_ratio": round(HEAD_RATIO, 3)}
    found = ratios_of(results, arguments.clients)
    _print_tables(results, found)
    print(json.dumps(report(results, found, machine, parameters)), flush=True)
    return 0 if all(found.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
