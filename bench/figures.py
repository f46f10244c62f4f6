"""From samples to figures, and from two systems' figures to the ratio of an aim."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np

from bench.samples import LoadRun, RequestSample

Figures = dict[str, float]
"""Of one system at one concurrency, by name; units are in the names."""
SystemFigures = Mapping[int, Figures]
"""By concurrency."""


@dataclass(frozen=True, slots=True)
class Aim:
    """A figure of ``system`` held against the same figure of ``peer``."""

    name: str
    system: str
    peer: str
    concurrency: int
    figure: str
    factor: float
    """``higher``: at least ``factor`` times the peer's; ``lower``: at most that."""
    better: Literal["higher", "lower"]

    def ratio(self, ours: float, theirs: float) -> float:
        """Return a number that is at least 1.0 exactly where the aim is met."""
        bound = self.factor * theirs
        return ours / bound if self.better == "higher" else bound / ours


def run_figures(run: LoadRun) -> Figures:
    """Return throughput, TTFT, ITL and their percentiles of one run.

    A percentile of nothing is left out. ``itl_ms`` is the gap between two events of one stream;
    where ``tokens_per_event`` is above 1, gaps are longer than those between tokens, and
    ``tpot_ms`` (a request's time after its first token, per token) is what compares.
    """
    good = [sample for sample in run.samples if sample.failure is None]
    events = sum(len(sample.arrivals) for sample in good)
    tokens = sum(sample.output_tokens for sample in good)
    figures: Figures = {
        "requests": len(run.samples),
        "failed_requests": len(run.samples) - len(good),
        "output_tok_s": tokens / (run.ended - run.started),
    }
    if events:
        figures["tokens_per_event"] = tokens / events
    figures |= _percentiles("ttft_ms", [1e3 * (s.arrivals[0] - s.sent) for s in good])
    figures |= _percentiles(
        "itl_ms", [1e3 * (after - before) for s in good for before, after in pairwise(s.arrivals)]
    )
    figures |= _percentiles("tpot_ms", [_time_per_token_ms(s) for s in good if s.output_tokens > 1])
    return figures


def _time_per_token_ms(sample: RequestSample) -> float:
    return 1e3 * (sample.arrivals[-1] - sample.arrivals[0]) / (sample.output_tokens - 1)


def _percentiles(name: str, values: Sequence[float]) -> Figures:
    if not values:
        return {}
    median, tail = np.percentile(values, [50, 99])
    return {f"{name}_p50": float(median), f"{name}_p99": float(tail)}


def combine(repeats: Sequence[Figures]) -> Figures:
    """Return the median of each figure over ``repeats``, with throughput's extremes.

    Requests and failures are added up. A figure that a repeat lacks is left out.
    """
    names = [name for name in repeats[0] if all(name in figures for figures in repeats)]
    combined = {name: statistics.median(f[name] for f in repeats) for name in names}
    for counter in ("requests", "failed_requests"):
        combined[counter] = sum(figures[counter] for figures in repeats)
    if len(repeats) > 1:
        rates = [figures["output_tok_s"] for figures in repeats]
        combined["output_tok_s_min"], combined["output_tok_s_max"] = min(rates), max(rates)
    return combined


def ratios(aims: Sequence[Aim], systems: Mapping[str, SystemFigures]) -> dict[str, float]:
    """Return the ratio of each aim that both of its systems have a sound figure for.

    A figure is sound where no request of its load failed. An aim without one has no ratio.
    """
    found: dict[str, float] = {}
    for aim in aims:
        ours = _sound_figure(aim, systems.get(aim.system))
        theirs = _sound_figure(aim, systems.get(aim.peer))
        if ours is not None and theirs is not None:
            found[aim.name] = round(aim.ratio(ours, theirs), 4)
    return found


def _sound_figure(aim: Aim, system: SystemFigures | None) -> float | None:
    figures = (system or {}).get(aim.concurrency, {})
    if figures.get("failed_requests", 1):
        return None
    value = figures.get(aim.figure)
    return value if value and value > 0 else None
