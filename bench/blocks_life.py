"""A request's life in both block managers, in turn: ratios per case, and whether they are flat."""

import os
import statistics
import subprocess
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from bench import peers
from bench.blocks_sluice import SluiceSide
from bench.blocks_task import HIT_TOKENS, Case, Life, Lives, Order
from bench.figures import Figures
from bench.measure import say

_ROOT = Path(__file__).parents[1]
_SMALL, _LARGE = 10_000, 1_000_000
_SPEED_AIM = 10.0
_FLAT_AIM = 1.25
"""A life in the large pool takes at most this many times one in the small pool."""
_REPEATS_PER_ORDER = 12
"""As many as fit into the small pool without an eviction."""
_END_TIMEOUT_S = 30.0
_ORDER_TIMEOUT_S = 300.0

Side = Callable[[Order], Sequence[Life]]


class PeerError(Exception):
    """The peer ended, or answered something that is no answer."""


@dataclass(slots=True)
class LifeResult:
    """What the lives of requests gave."""

    figures: dict[str, dict[str, Figures]]
    """By case, then by side."""
    ratios: dict[str, float]


def cases(sizes: Sequence[int] = (_SMALL, _LARGE)) -> list[Case]:
    """Return all cases; those of one size follow each other, so that its pool is made once."""
    return [
        Case(num_blocks, hit_tokens, is_full)
        for num_blocks in sizes
        for is_full in (False, True)
        for hit_tokens in (0, HIT_TOKENS)
    ]


@contextmanager
def vllm_side(log: Path) -> Generator[Side]:
    """Start vLLM's child process; end it afterwards, whatever happened."""
    command = [str(peers.vllm_python()), "-m", "bench.blocks_vllm"]
    with (
        log.open("wb") as errors,
        subprocess.Popen(
            command,
            cwd=_ROOT,
            env={**os.environ, "VLLM_LOGGING_LEVEL": "ERROR", "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
        ) as child,
    ):
        try:
            yield lambda order: _ask(child, order, log)
        finally:
            child.kill()
            child.wait(_END_TIMEOUT_S)


def _ask(child: subprocess.Popen[bytes], order: Order, log: Path) -> Sequence[Life]:
    assert child.stdin is not None
    assert child.stdout is not None
    limit = threading.Timer(_ORDER_TIMEOUT_S, child.kill)
    limit.start()
    try:
        child.stdin.write(msgspec.json.encode(order) + b"\n")
        child.stdin.flush()
        return msgspec.json.decode(child.stdout.readline(), type=Lives).lives
    except (OSError, msgspec.DecodeError) as error:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines() or ["no output"]
        raise PeerError(f"vLLM's block manager failed: {lines[-1]}") from error
    finally:
        limit.cancel()


def measure_lives(all_cases: Sequence[Case], *, rounds: int, peer: Side | None) -> LifeResult:
    """Measure every case with both sides in turn, ``rounds`` times.

    Without a peer its figures and ratios are absent.

    Raises:
        PeerError: the peer ended.
        UnexpectedHitError: a lookup of ours found another prefix than its case is about.
    """
    sides: dict[str, Side] = {
        "sluice": SluiceSide().carry_out,
        "sluice_with_steps": SluiceSide(with_steps=True).carry_out,
        **({"vllm": peer} if peer else {}),
    }
    result = LifeResult({}, {})
    for case in all_cases:
        lives: dict[str, list[Life]] = {name: [] for name in sides}
        for side in sides.values():
            side(Order(case, 1))  # warm-up: pools are made and filled
        for _ in range(rounds):
            for name, side in sides.items():
                lives[name] += side(Order(case, _REPEATS_PER_ORDER))
        result.figures[case.name] = {name: life_figures(of) for name, of in lives.items()}
        say(f"{case.name}: {_summary(result.figures[case.name])}")
    result.ratios = life_ratios(result.figures, all_cases)
    return result


def life_figures(lives: Sequence[Life]) -> Figures:
    """Return the median of each part of ``lives``, and the extremes of the whole."""
    parts = ("build_us", "admit_us", "append_us", "release_us", "manager_us", "whole_us")
    figures = {part: statistics.median(getattr(life, part) for life in lives) for part in parts}
    figures["manager_us_min"] = min(life.manager_us for life in lives)
    figures["manager_us_p90"] = statistics.quantiles((life.manager_us for life in lives), n=10)[8]
    return {name: round(value, 2) for name, value in figures.items()}


def life_ratios(
    figures: dict[str, dict[str, Figures]], all_cases: Sequence[Case]
) -> dict[str, float]:
    """Return the ratio of each aim; those that need the peer only where it was measured."""
    found: dict[str, float] = {}
    for case in all_cases:
        sides = figures[case.name]
        for part in ("manager", "whole") if "vllm" in sides else ():
            times = sides["vllm"][f"{part}_us"] / sides["sluice"][f"{part}_us"]
            name = f"life of a request, {case.name}: {part}, {_SPEED_AIM:g}x vLLM's"
            found[name] = round(times / _SPEED_AIM, 4)
    for small in all_cases:
        large = msgspec.structs.replace(small, num_blocks=_LARGE)
        if small.num_blocks == _SMALL and large in all_cases:
            grows = _manager_us(figures, large) / _manager_us(figures, small)
            state = small.name.replace(f", {_SMALL:,} blocks", "")
            name = f"life of a request, {state}: 1M blocks at most {_FLAT_AIM:g}x 10k"
            found[name] = round(_FLAT_AIM / grows, 4)
    return found


def _manager_us(figures: dict[str, dict[str, Figures]], case: Case) -> float:
    return figures[case.name]["sluice"]["manager_us"]


def _summary(sides: dict[str, Figures]) -> str:
    return ", ".join(f"{name} {figures['manager_us']:.0f} us" for name, figures in sides.items())
