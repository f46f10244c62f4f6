"""Draw what the dashboards show of a running deployment: ``python -m bench.dashboard_pictures``.

The panels' own expressions, asked of a Prometheus, as small charts in one SVG per dashboard. It is
no screenshot of Grafana: lines and numbers are the same, their looks are not.
"""

import argparse
import json
import re
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any, Final

from deploy.observability.files import DASHBOARDS
from deploy.observability.grafana import Dashboard, Panel

WIDTH: Final = 300
HEIGHT: Final = 150
LEGEND: Final = 4
"""Names of series below a chart."""
LINE: Final = 12
COLUMNS: Final = 3
NUM_STEPS: Final = 60
"""Between the first and the last point of a line."""
COLOURS: Final = ("#1f77b4", "#d95f02", "#2ca02c", "#9467bd", "#b8860b", "#17becf", "#d62728")
SUFFIX: Final = {"percentunit": "", "reqps": "/s", "ops": "/s", "bytes": "B", "Bps": "B/s"}
Points = list[tuple[float, float]]


def main() -> None:
    """Write one picture per dashboard."""
    parser = argparse.ArgumentParser(description=__doc__.partition(":")[0])
    parser.add_argument("prometheus", help="URL of a Prometheus that scrapes the deployment")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--last", type=float, default=60.0, help="seconds to show (default: 60)")
    parser.add_argument("--rate", default="10s", help="window of rates (default: 10s)")
    asked = parser.parse_args()
    end = time.time()
    span = (end - asked.last, end)
    for dashboard in DASHBOARDS:
        charts = {
            panel.title: series_of(asked.prometheus, panel, span, asked.rate)
            for panel in dashboard.panels
        }
        path = asked.folder / f"{dashboard.uid}.svg"
        path.write_text(draw(dashboard, charts, span))
        print(path, path.stat().st_size, "bytes")


def series_of(
    url: str, panel: Panel, span: tuple[float, float], rate: str
) -> list[tuple[str, Points]]:
    """Return the panel's series by name, in the order of their queries; without NaN."""
    found: list[tuple[str, Points]] = []
    for query in panel.queries:
        expr = query.whole(rate_interval=rate)
        for series in _ask(url, expr, span):
            name = re.sub(
                r"\{\{(\w+)\}\}", lambda m, s=series: s["metric"].get(m[1], ""), query.legend
            )
            points = [(float(at), float(value)) for at, value in series["values"]]
            found.append((name, [point for point in points if point[1] == point[1]]))
    return found


def _ask(url: str, expr: str, span: tuple[float, float]) -> list[Any]:
    step = (span[1] - span[0]) / NUM_STEPS
    query = urllib.parse.urlencode({"query": expr, "start": span[0], "end": span[1], "step": step})
    with urllib.request.urlopen(f"{url}/api/v1/query_range?{query}", timeout=10) as answer:  # noqa: S310
        return json.load(answer)["data"]["result"]


def draw(
    dashboard: Dashboard,
    charts: dict[str, list[tuple[str, Points]]],
    span: tuple[float, float],
) -> str:
    """Return the dashboard as SVG; a row of which nothing has data is left out."""
    parts: list[str] = []
    top = 30
    for row in dashboard.rows:
        shown = [panel for panel in row.panels if charts[panel.title]]
        if not shown:
            continue
        parts.append(f'<text x="8" y="{top + 14}" class="row">{escape(row.title)}</text>')
        top += 22
        for index, panel in enumerate(shown):
            line, column = divmod(index, COLUMNS)
            place = (column * WIDTH, top + line * (HEIGHT + LEGEND * LINE))
            parts.extend(_chart(panel, charts[panel.title], span, place))
        top += -(-len(shown) // COLUMNS) * (HEIGHT + LEGEND * LINE) + 6
    size = f'width="{COLUMNS * WIDTH}" height="{top}" viewBox="0 0 {COLUMNS * WIDTH} {top}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size}>\n<style>text{{font:10px sans-serif;'
        "fill:#333}.title{font:bold 11px sans-serif}.row{font:bold 13px sans-serif;fill:#555}"
        ".head{font:bold 16px sans-serif}"
        "polyline{fill:none;stroke-width:1.4;stroke-linecap:round}</style>\n"
        '<rect width="100%" height="100%" fill="#fff"/>\n'
        f'<text x="8" y="20" class="head">{escape(dashboard.title)}</text>\n'
        f'<text x="{COLUMNS * WIDTH - 8}" y="20" text-anchor="end">'
        f"{span[1] - span[0]:.0f} seconds from left to right</text>\n"
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def _chart(
    panel: Panel,
    series: Sequence[tuple[str, Points]],
    span: tuple[float, float],
    place: tuple[int, int],
) -> Iterator[str]:
    left, top = place
    x0, y0, width, height = left + 58, top + 20, WIDTH - 70, HEIGHT - 40
    highest = max((value for _, points in series for _, value in points), default=0.0) or 1.0
    yield f'<text x="{left + 8}" y="{top + 12}" class="title">{escape(panel.title)}</text>'
    yield (
        f'<rect x="{x0}" y="{y0}" width="{width}" height="{height}" fill="#f7f7f7" stroke="#ddd"/>'
    )
    for share in (0.0, 1.0):
        y = y0 + height - share * height
        text = escape(_number(share * highest, panel.unit))
        yield f'<text x="{x0 - 4}" y="{y + 3:.0f}" text-anchor="end">{text}</text>'
    loudest = sorted(series, key=lambda each: -max((v for _, v in each[1]), default=0.0))
    heard = [each for each in loudest if any(value for _, value in each[1])]
    loudest = heard or loudest[:LEGEND]  # lines at zero tell nothing beside others
    for index, (name, points) in enumerate(loudest):
        colour = COLOURS[index % len(COLOURS)]
        for run in _runs(points, (span[1] - span[0]) / NUM_STEPS):
            coordinates = " ".join(
                f"{x0 + (at - span[0]) / (span[1] - span[0]) * width:.1f},"
                f"{y0 + height - value / highest * height:.1f}"
                for at, value in (run if len(run) > 1 else run * 2)  # a dot, not nothing
            )
            yield f'<polyline points="{coordinates}" stroke="{colour}"/>'
        if index < LEGEND:
            y = y0 + height + 13 + index * LINE
            more = f"  (+{len(loudest) - LEGEND})" * (index == LEGEND - 1 and len(loudest) > LEGEND)
            text = escape(f"{name}{more}")
            yield f'<rect x="{x0}" y="{y - 5}" width="8" height="3" fill="{colour}"/>'
            yield f'<text x="{x0 + 12}" y="{y}">{text}</text>'


def _runs(points: Points, step_s: float) -> Iterator[Points]:
    """Yield the parts of a line between times at which it has no value."""
    start = 0
    for index in range(1, len(points) + 1):
        is_end = index == len(points) or points[index][0] - points[index - 1][0] > 1.5 * step_s
        if is_end:
            yield points[start:index]
            start = index


def _number(value: float, unit: str) -> str:
    if value == 0:
        return "0"
    if unit == "percentunit":
        return f"{value:.0%}"
    if unit == "s":
        for size, suffix in ((1.0, "s"), (1e-3, "ms")):
            if value >= size:
                return f"{value / size:.3g} {suffix}"
        return f"{value * 1e6:.3g} us"
    for size, prefix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.3g} {prefix}{SUFFIX.get(unit, '')}"
    return f"{value:.3g} {SUFFIX.get(unit, '')}".strip()


if __name__ == "__main__":
    main()
