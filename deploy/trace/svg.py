"""A request's way as a picture: one SVG file that needs nothing else."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final
from xml.sax.saxutils import escape

from deploy.trace.lanes import (
    MEANING,
    Bar,
    Hop,
    Kind,
    Lane,
    Mark,
    Tick,
    hops_of,
    lanes_of,
    tail_of,
)
from deploy.trace.request import RequestTrace, figures_of, milliseconds, sisters_of, summary_of

WIDTH: Final = 1080
LEFT: Final = 176
RIGHT: Final = 24
LANE: Final = 46
BAR: Final = 22
LINE: Final = 18
FONT: Final = "font-family='Helvetica, Arial, sans-serif'"
CHAR: Final = 5.9
"""Width of a character at the labels' size, about."""
MIN_BAR: Final = 1.5
COLOR: Final[dict[Kind, str]] = {
    "step": "#3d6fb4",
    "read": "#1f9d73",
    "stream": "#e39a3b",
    "wait": "#dfe3e8",
    "lease": "#cdbfe6",
    "failure": "#cf3b34",
}
MARK_COLOR: Final[dict[Mark, str]] = {
    "ticket": "#7445b8",
    "token": "#c06d0e",
    "end": "#59636e",
    "failure": "#cf3b34",
    "renewal": "#8c959f",
}
TRIANGLES: Final[dict[Mark, str]] = {
    "ticket": "ticket, sent and received",
    "renewal": "lease renewed",
}
THIN: Final[frozenset[Kind]] = frozenset({"lease", "wait"})
"""Drawn thin: time in which nothing is done."""


@dataclass(frozen=True, slots=True)
class Scale:
    """Seconds to x. What lies outside is cut off at the edges."""

    start_s: float
    end_s: float

    def x(self, at_s: float) -> float:
        """Return the place of ``at_s``."""
        part = (at_s - self.start_s) / (self.end_s - self.start_s)
        return LEFT + min(max(part, 0.0), 1.0) * (WIDTH - LEFT - RIGHT)

    def shows(self, start_s: float, end_s: float) -> bool:
        """Whether any of that time is in the picture."""
        return end_s >= self.start_s and start_s <= self.end_s


def draw(trace: RequestTrace) -> str:
    """Return the picture of ``trace``: the whole, and the end of prefill again, enlarged."""
    lanes, hops = lanes_of(trace), hops_of(trace)
    span_s = max(trace.end_s - trace.start_s, 1e-6)
    whole = Scale(trace.start_s, trace.end_s + 0.01 * span_s)
    sisters = sisters_of(trace)
    summary = [*([] if sisters is None else [sisters]), *summary_of(figures_of(trace))]
    parts = [_text(16, 28, trace.request_id, size=15, weight="bold")]
    y = 28.0
    for line in summary:
        y += LINE
        parts.append(_text(16, y, line, size=12, fill="#424a53"))
    panel, y = _panel(lanes, hops, whole, y + 26)
    parts += panel
    tail = tail_of(trace)
    if tail is not None:
        title = f"The end of prefill, enlarged: {milliseconds(tail[1] - tail[0])} of the above"
        parts.append(_text(16, y + 30, title, size=12, weight="bold"))
        panel, y = _panel(lanes, hops, Scale(*tail), y + 44)
        parts += panel
    parts += _legend(y + 26, lanes)
    height = y + 44
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {WIDTH} {height:.0f}' "
        f"width='{WIDTH}' height='{height:.0f}' {FONT}>\n"
        f"<rect width='100%' height='100%' fill='white'/>\n" + "\n".join(parts) + "\n</svg>\n"
    )


def _panel(lanes: list[Lane], hops: list[Hop], scale: Scale, top: float) -> tuple[list[str], float]:
    """Return the lanes on one axis from ``top`` down, and where they end."""
    bottom = top + LANE * len(lanes)
    parts = list(_axis(scale, top, bottom))
    middle_of = {lane.name: top + LANE * (index + 0.5) for index, lane in enumerate(lanes)}
    parts += [
        _hop(hop, scale, middle_of) for hop in hops if scale.shows(hop.sent_s, hop.received_s)
    ]
    for index, lane in enumerate(lanes):
        parts += _lane(lane, scale, top + LANE * index)
    return parts, bottom + LINE


def _axis(scale: Scale, top: float, bottom: float) -> Iterator[str]:
    for at_s in _round_times(scale):
        x = scale.x(at_s)
        yield _line(x, top, x, bottom, color="#e7eaee")
        yield _text(x, bottom + 14, _axis_label(at_s, scale), size=10, anchor="middle")
    yield _line(LEFT, bottom, WIDTH - RIGHT, bottom, color="#8c959f")


def _round_times(scale: Scale) -> Iterator[float]:
    """Yield about eight round times."""
    rough_s = (scale.end_s - scale.start_s) / 8
    power = 10.0 ** math.floor(math.log10(rough_s))
    step_s = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough_s)
    index = math.ceil(scale.start_s / step_s)
    while index * step_s <= scale.end_s:
        yield index * step_s
        index += 1


def _axis_label(at_s: float, scale: Scale) -> str:
    span_ms = (scale.end_s - scale.start_s) * 1e3
    digits = max(0, math.ceil(1 - math.log10(span_ms)))
    return f"{at_s * 1e3:,.{digits}f} ms"


def _lane(lane: Lane, scale: Scale, top: float) -> Iterator[str]:
    middle = top + LANE / 2
    yield _line(16, top, WIDTH - RIGHT, top, color="#eef0f3")
    yield _text(16, middle - 2, lane.name, size=12, weight="bold")
    yield _text(16, middle + 12, lane.note, size=10, fill="#59636e")
    for bar in sorted(lane.bars, key=lambda bar: bar.kind not in THIN):
        if scale.shows(bar.start_s, bar.end_s):
            yield _bar(bar, scale, middle)
    for tick in lane.ticks:
        if scale.shows(tick.at_s, tick.at_s):
            yield _tick(tick, scale.x(tick.at_s), middle)


def _bar(bar: Bar, scale: Scale, middle: float) -> str:
    x = scale.x(bar.start_s)
    width = max(scale.x(bar.end_s) - x, MIN_BAR)
    height = BAR / 3 if bar.kind in THIN else BAR
    top = middle - height / 2
    label = ""
    if bar.label and bar.kind not in THIN and len(bar.label) * CHAR + 8 < width:
        label = _text(x + width / 2, middle + 4, bar.label, size=11, anchor="middle", fill="white")
    elif bar.label and bar.kind == "wait" and len(bar.label) * CHAR + 8 < width:
        label = _text(x + 4, middle - 13, bar.label, size=10, fill="#59636e")
    return (
        f"<g><title>{escape(bar.detail)}</title><rect x='{x:.1f}' y='{top:.1f}' "
        f"width='{width:.1f}' height='{height:.1f}' rx='2' fill='{COLOR[bar.kind]}' "
        f"stroke='white' stroke-width='0.5'/>{label}</g>"
    )


def _tick(tick: Tick, x: float, middle: float) -> str:
    color = MARK_COLOR[tick.mark]
    base = middle + BAR / 2 + 1
    if tick.mark in TRIANGLES:
        shape = f"<path d='M {x:.1f} {base:.1f} l -4 8 h 8 z' fill='{color}'/>"
    else:
        shape = f"<path d='M {x:.1f} {middle - 14:.1f} v 28' stroke='{color}' stroke-width='2'/>"
        name = tick.detail.partition(":")[0]
        shape += _text(x - 4, middle - 13, name, size=10, anchor="end", fill=color)
    return f"<g><title>{escape(tick.detail)}, {milliseconds(tick.at_s)}</title>{shape}</g>"


def _hop(hop: Hop, scale: Scale, middle_of: dict[str, float]) -> str:
    below = BAR / 2 + 4
    return _line(
        scale.x(hop.sent_s),
        middle_of[hop.from_lane] + below,
        scale.x(hop.received_s),
        middle_of[hop.to_lane] + below,
        color=MARK_COLOR["ticket"],
        dash="3 2",
    )


def _legend(y: float, lanes: list[Lane]) -> Iterator[str]:
    kinds = {bar.kind for lane in lanes for bar in lane.bars}
    x = float(LEFT)
    for kind, meaning in MEANING.items():
        if kind in kinds:
            yield (
                f"<rect x='{x:.0f}' y='{y - 9:.0f}' width='14' height='10' rx='2' "
                f"fill='{COLOR[kind]}'/>"
            )
            yield _text(x + 19, y, meaning, size=11, fill="#424a53")
            x += 19 + len(meaning) * CHAR + 22
    marks = {tick.mark for lane in lanes for tick in lane.ticks}
    for mark, meaning in TRIANGLES.items():
        if mark in marks:
            color = MARK_COLOR[mark]
            yield f"<path d='M {x + 6:.0f} {y - 9:.0f} l -5 10 h 10 z' fill='{color}'/>"
            yield _text(x + 16, y, meaning, size=11, fill="#424a53")
            x += 16 + len(meaning) * CHAR + 22


def _text(
    x: float,
    y: float,
    text: str,
    *,
    size: int,
    fill: str = "#1f2328",
    weight: str = "normal",
    anchor: str = "start",
) -> str:
    return (
        f"<text x='{x:.1f}' y='{y:.1f}' font-size='{size}' fill='{fill}' font-weight='{weight}' "
        f"text-anchor='{anchor}'>{escape(text)}</text>"
    )


def _line(x1: float, y1: float, x2: float, y2: float, *, color: str, dash: str = "none") -> str:
    return (
        f"<line x1='{x1:.1f}' y1='{y1:.1f}' x2='{x2:.1f}' y2='{y2:.1f}' stroke='{color}' "
        f"stroke-dasharray='{dash}'/>"
    )
