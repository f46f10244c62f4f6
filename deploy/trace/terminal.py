"""A request's way in a terminal: the lanes in one line each, then every entry."""

from collections.abc import Iterator
from typing import Final

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from deploy.trace.lanes import MEANING, Bar, Kind, Lane, lanes_of
from deploy.trace.request import (
    Entry,
    RequestTrace,
    figures_of,
    megabytes,
    milliseconds,
    sisters_of,
    summary_of,
)

LEFT: Final = 14
GAP: Final = 3
"""Cells between two entries of the legend."""
CELL: Final[dict[Kind, tuple[str, str]]] = {
    "wait": ("─", "bright_black"),
    "lease": ("╌", "magenta"),
    "stream": ("▒", "yellow"),
    "step": ("█", "blue"),
    "read": ("█", "green"),
    "failure": ("X", "red"),
}
"""Later ones are drawn over earlier ones."""


def print_trace(trace: RequestTrace, console: Console) -> None:
    """Print ``trace`` as wide as the terminal is."""
    console.print(f"[bold]{trace.request_id}[/bold]", highlight=False)
    sisters = sisters_of(trace)
    if sisters is not None:
        told = Text(f"{sisters}; --choice N shows another")
        console.print(Padding(told, (0, 0, 0, 2)))
    for line in summary_of(figures_of(trace)):
        console.print(Padding(Text(line), (0, 0, 0, 2)))
    console.print()
    width = max(console.width - LEFT - 1, 20)
    lanes = lanes_of(trace)
    for lane in lanes:
        console.print(_row(lane, trace, width))
    console.print(_scale(trace, width), style="bright_black", highlight=False)
    for line in _legend(lanes, width):
        console.print(Text(" " * LEFT).append_text(line))
    console.print()
    console.print(_table(trace))
    for process in trace.processes:
        if process.status != "ok":
            console.print(f"{process.name}: {_MISSING[process.status]}", highlight=False)


_MISSING: Final = {
    "unknown": "has nothing of this request, or no more (trace_requests)",
    "unreachable": "did not answer",
}


def _row(lane: Lane, trace: RequestTrace, width: int) -> Text:
    cells: list[tuple[str, str]] = [(" ", "")] * width
    for kind, cell in CELL.items():
        for bar in lane.bars:
            if bar.kind == kind:
                first, last = _cells(bar, trace, width)
                cells[first : last + 1] = [cell] * (last + 1 - first)
    row = Text(f"{lane.name:<{LEFT}.{LEFT}}", style="bold")
    for character, style in cells:
        row.append(character, style=style)
    return row


def _cells(bar: Bar, trace: RequestTrace, width: int) -> tuple[int, int]:
    """Return the first and the last cell of ``bar``, at least one."""
    span_s = max(trace.end_s - trace.start_s, 1e-9)
    first, last = (
        min(max(int((at_s - trace.start_s) / span_s * width), 0), width - 1)
        for at_s in (bar.start_s, bar.end_s)
    )
    return first, max(first, last)


def _scale(trace: RequestTrace, width: int) -> str:
    start, end = milliseconds(trace.start_s), milliseconds(trace.end_s)
    return f"{'':<{LEFT}}{start}{end:>{max(width - len(start), len(end))}}"


def _legend(lanes: list[Lane], width: int) -> Iterator[Text]:
    """Yield lines of ``width`` cells; what explains one kind of bar is on one of them."""
    kinds = {bar.kind for lane in lanes for bar in lane.bars}
    line = Text()
    for kind, (character, style) in CELL.items():
        if kind in kinds:
            entry = Text(character * 2, style=style).append(f" {MEANING[kind]}", style="default")
            if line and line.cell_len + GAP + entry.cell_len > width:
                yield line
                line = Text()
            line.append(" " * GAP if line else "").append_text(entry)
    yield line


def _table(trace: RequestTrace) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("ms", justify="right", no_wrap=True)
    table.add_column("where", no_wrap=True)
    table.add_column("what", no_wrap=True)
    table.add_column("")
    for name, entry in sorted(_all(trace), key=lambda pair: pair[1].at_s):
        attempt = f" (attempt {entry.attempt})" if entry.attempt > 1 else ""
        table.add_row(
            f"{entry.at_s * 1e3:,.1f}",
            name,
            f"{entry.event.replace('_', ' ')}{attempt}",
            Text(", ".join(_values(entry))),
        )
    return table


def _all(trace: RequestTrace) -> Iterator[tuple[str, Entry]]:
    for process in trace.processes:
        for entry in process.events:
            yield process.name, entry


def _values(entry: Entry) -> Iterator[str]:
    if "first_layer" in entry.values:
        yield f"layers {entry.number('first_layer'):.0f} to {entry.number('last_layer'):.0f}"
    for name, value in entry.values.items():
        if name in ("first_layer", "last_layer"):
            continue
        if name == "last":
            if value:
                yield "of the last chunk"
        elif name == "seconds":
            yield milliseconds(float(value))
        elif name == "nbytes":
            yield megabytes(float(value))
        else:
            number = f"{value:,}" if isinstance(value, int) else str(value)
            yield f"{name.replace('_', ' ')} {number}"
