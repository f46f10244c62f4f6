"""The figures of ``sluice top`` as lines of text: 80 columns do, more give longer bars."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final, get_args

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from core.messages import Role
from deploy.top.figures import TopFigures, WorkerFigures

STATE_STYLE: Final = {"ready": "green", "starting": "yellow", "draining": "magenta", "lost": "red"}
BLOCK_CELLS: Final = (
    ("active", "█", "blue"),
    ("leased", "▓", "magenta"),
    ("fenced", "#", "yellow"),
    ("quarantined", "!", "red"),
    ("cached", "░", "cyan"),
    ("free", "·", "bright_black"),
)
"""In the order of the bar. No two look alike without their colours."""
PATH_NAMES: Final = {
    "shared_memory": "shared memory",
    "rdma": "RDMA",
    "tcp": "TCP",
    "cuda_ipc": "CUDA IPC",
    "unknown": "path not known yet",
}
MAX_TROUBLES_SHOWN: Final = 3
"""Of a router's lines about workers that do not serve: they are above the workers that do."""
MIN_BAR: Final = 10
FIXED: Final = 44
"""Columns of a worker's line beside its name and bar."""
NAME: Final = 12
HINT: Final = "Ctrl-C leaves"


@dataclass(frozen=True, slots=True)
class TopView:
    """A picture that fits itself to the terminal."""

    figures: TopFigures
    url: str
    stale_reason: str = ""
    """Why the picture is an old one."""
    is_live: bool = False
    """Whether it is followed by others."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """See rich: the lines of ``lines_of``."""
        del console
        height = options.height
        lines = lines_of(self, options.max_width, with_details=True)
        if height is not None and len(lines) > height:
            lines = lines_of(self, options.max_width, with_details=False)
        yield Text("\n").join(lines[:height])


def lines_of(view: TopView, width: int, *, with_details: bool) -> list[Text]:
    """Return the picture, no line longer than ``width``.

    Args:
        view: What to show.
        width: Columns, 80 or more for everything to be seen.
        with_details: Give each worker a second line, with its transfers.
    """
    lines = [*_head(view), Text()]
    names = max((len(w.status.worker_id) for w in view.figures.workers), default=0)
    name_width = min(max(names, NAME), max(NAME, width - FIXED - MIN_BAR - 6))
    bar_width = max(MIN_BAR, width - FIXED - name_width - 6)
    heading = (
        f"{'worker':<{name_width}} {'state':<8} {'run':>4} {'wait':>4} {'in/s':>6} {'out/s':>6} "
        f"{'hit':>4}  KV blocks"
    )
    lines.append(Text(heading, style="bold"))
    for role in get_args(Role):
        for worker in view.figures.of_role(role):
            lines.append(_row(worker, name_width, bar_width))
            if with_details and worker.status.state != "lost":
                lines.append(Text("  " + ", ".join(_details(worker)), style="bright_black"))
    if not view.figures.workers:
        lines.append(Text("no worker reports to this router", style="yellow"))
    lines += [Text(), _legend()]
    for line in lines:
        line.truncate(width, overflow="ellipsis")
    return lines


def _head(view: TopView) -> Iterator[Text]:
    figures = view.figures
    state = ("ready", "green") if figures.is_ready else ("not ready", "red")
    if view.stale_reason:
        state = ("no answer", "red")
    yield Text.assemble(
        (view.url, "bold"),
        f"  {figures.status.model}  ",
        state,
        f"  {_age(figures)}",
        (f"  {HINT}" if view.is_live else "", "bright_black"),
    )
    if view.stale_reason:
        yield Text(view.stale_reason, style="red")
    ttft, itl = (
        f"{_milliseconds(p50)} / {_milliseconds(p99)}"
        for p50, p99 in (figures.ttft_s, figures.itl_s)
    )
    yield Text(
        f"requests {figures.status.pending_requests} pending, {_rate(figures.requests_per_s)}/s, "
        f"{_rate(figures.failures_per_s)}/s failed   "
        f"tokens {_rate(figures.input_per_s)}/s in, {_rate(figures.output_per_s)}/s out"
    )
    yield Text(f"TTFT p50 / p99 {ttft} ms   ITL p50 / p99 {itl} ms")
    yield from _missing(figures)
    for line in figures.status.trouble[:MAX_TROUBLES_SHOWN]:
        yield Text(line, style="red")


def _missing(figures: TopFigures) -> Iterator[Text]:
    for role in get_args(Role):
        num_ready = sum(worker.status.state == "ready" for worker in figures.of_role(role))
        num_desired = figures.num_desired.get(role, 0)
        if num_ready < num_desired:
            yield Text(f"{role}: {num_ready} of {num_desired} workers ready", style="yellow")


def _age(figures: TopFigures) -> str:
    return f"last {figures.window_s:.0f} s" if figures.window_s else "since its start"


def _row(worker: WorkerFigures, name_width: int, bar_width: int) -> Text:
    status, load = worker.status, worker.status.load
    name = Text(status.worker_id)
    name.truncate(name_width, overflow="ellipsis", pad=True)
    row = Text.assemble(
        name,
        " ",
        (f"{status.state:<8}", STATE_STYLE[status.state]),
        f" {load.running:>4} {load.waiting:>4}",
        f" {_rate(worker.input_per_s):>6} {_rate(worker.output_per_s):>6}",
        f" {_percent(worker.hit_share):>4}  ",
    )
    if status.state == "lost":
        return row.append(f"not heard of for {status.silent_s:.0f} s", style="red")
    if not worker.is_answering:
        return row.append("its metrics do not answer", style="red")
    blocks = worker.blocks or {}
    used = sum(count for state, count in blocks.items() if state not in {"free", "cached"})
    total = sum(blocks.values())
    return row.append_text(block_bar(blocks, bar_width)).append(
        f" {_percent(used / total if total else None):>4}"
    )


def block_bar(blocks: Mapping[str, int], width: int) -> Text:
    """Return ``width`` cells shared out by state; a state with a block has a cell while any fit."""
    total = sum(blocks.values())
    if not total:
        return Text(" " * width)
    shares = {state: blocks.get(state, 0) * width / total for state, _, _ in BLOCK_CELLS}
    cells = {state: max(int(share), 1 if share else 0) for state, share in shares.items()}
    while sum(cells.values()) > width:
        cells[max(cells, key=lambda state: cells[state])] -= 1
    while sum(cells.values()) < width:
        cells[max(cells, key=lambda state: shares[state] - cells[state])] += 1
    bar = Text()
    for state, cell, style in BLOCK_CELLS:
        bar.append(cell * cells[state], style=style)
    return bar


def _details(worker: WorkerFigures) -> Iterator[str]:
    load, blocks = worker.status.load, worker.blocks or {}
    if worker.status.role == "prefill":
        yield f"{_short(load.queued_tokens)} tokens queued"
        yield f"{worker.leases} leases"
    else:
        yield f"{worker.reads_in_flight} reads in flight"
        yield _speed(worker.nbytes_per_s)
        if worker.read_p99_s is not None:
            yield f"p99 {_milliseconds(worker.read_p99_s)} ms"
        for path, count in (worker.paths or {}).items():
            if count:
                yield f"{PATH_NAMES.get(path, path)} x{count}"
    for state in ("fenced", "quarantined"):
        if blocks.get(state):
            yield f"{blocks[state]} {state}"


def _legend() -> Text:
    legend = Text("blocks: ")
    for state, cell, style in BLOCK_CELLS:
        legend.append(cell, style=style).append(f" {state}  ")
    legend.rstrip()
    return legend


def _rate(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.1f}" if 0 < value < 10 else _short(value)  # noqa: PLR2004 - one digit


def _short(value: float) -> str:
    """Return ``value`` in four characters or few more."""
    for limit, divisor, unit in ((1e4, 1, ""), (1e7, 1e3, "k"), (1e10, 1e6, "M")):
        if value < limit:
            return f"{value / divisor:.0f}{unit}"
    return f"{value / 1e9:.0f}G"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"


def _milliseconds(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds * 1000:.1f}" if seconds < 0.01 else f"{seconds * 1000:.0f}"  # noqa: PLR2004


def _speed(nbytes_per_s: float | None) -> str:
    if nbytes_per_s is None:
        return "- GB/s"
    if 0 < nbytes_per_s < 0.1e9:  # noqa: PLR2004 - of which GB/s would show one digit, or none
        return f"{nbytes_per_s / 1e6:.1f} MB/s"
    return f"{nbytes_per_s / 1e9:.2f} GB/s"
