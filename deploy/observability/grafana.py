"""Dashboards as values, and the JSON that Grafana imports.

Expressions name their labels by a placeholder that becomes the dashboard's variables:
``{@}`` a deployment, ``{@model}`` the router's metrics of a model, ``{@worker}`` single processes.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, Final

Json = dict[str, Any]

DEPLOYMENT: Final = 'namespace=~"$namespace",release=~"$release"'
SELECTORS: Final = {
    "@model": f'{DEPLOYMENT},model=~"$model"',
    "@worker": f'{DEPLOYMENT},role=~"$role",instance=~"$worker"',
    "@": DEPLOYMENT,
}
SCHEMA_VERSION: Final = 41
NUM_COLUMNS: Final = 24
PANEL_HEIGHT: Final = 8
_DATASOURCE: Final = {"type": "prometheus", "uid": "${datasource}"}


@dataclass(frozen=True, slots=True)
class Query:
    """One expression, and how its series are named."""

    expr: str
    legend: str = ""

    @property
    def promql(self) -> str:
        """The expression with the dashboard's variables."""
        expr = self.expr
        for placeholder, selector in SELECTORS.items():
            expr = expr.replace(placeholder, selector)
        return expr

    def whole(self, *, rate_interval: str = "30s") -> str:
        """Return the expression as Grafana sends it with everything chosen."""
        return re.sub(r"\$\w+", ".*", self.promql.replace("$__rate_interval", rate_interval))


@dataclass(frozen=True, slots=True)
class Panel:
    """One chart over time. ``unit`` is Grafana's name of it."""

    title: str
    queries: Sequence[Query]
    unit: str = "short"
    text: str = ""
    """What it tells, shown at the panel's corner."""
    stacked: bool = False
    needs: str = ""
    """The event, or the exporter, without which there is nothing to show; "": any traffic."""


@dataclass(frozen=True, slots=True)
class Row:
    """Panels below one heading, three beside each other."""

    title: str
    panels: Sequence[Panel]


@dataclass(frozen=True, slots=True)
class Variable:
    """A choice at the top of a dashboard: the values of ``label`` that ``metric`` has."""

    name: str
    metric: str
    label: str


OF_A_DEPLOYMENT: Final = (
    Variable("namespace", "sluice_build_info", "namespace"),
    Variable("release", "sluice_build_info", "release"),
)
"""What every dashboard is narrowed by, and ``DEPLOYMENT`` selects."""


@dataclass(frozen=True, slots=True)
class Dashboard:
    """One page."""

    uid: str
    title: str
    text: str
    rows: Sequence[Row]
    variables: Sequence[Variable]

    @property
    def panels(self) -> list[Panel]:
        """All panels, from the top."""
        return [panel for row in self.rows for panel in row.panels]

    def to_json(self) -> Json:
        """Return the model that Grafana imports; ``id`` is the importing Grafana's."""
        return {
            "uid": self.uid,
            "title": self.title,
            "description": self.text,
            "tags": ["sluice"],
            "schemaVersion": SCHEMA_VERSION,
            "editable": True,
            "graphTooltip": 1,
            "refresh": "10s",
            "time": {"from": "now-1h", "to": "now"},
            "timezone": "browser",
            "templating": {"list": self._variables()},
            "annotations": {"list": []},
            "links": [
                {
                    "type": "dashboards",
                    "title": "Sluice",
                    "tags": ["sluice"],
                    "asDropdown": False,
                    "icon": "external link",
                    "includeVars": True,
                    "keepTime": True,
                    "targetBlank": False,
                    "tooltip": "",
                    "url": "",
                }
            ],
            "panels": self._panels(),
        }

    def _variables(self) -> list[Json]:
        datasource = {
            "name": "datasource",
            "type": "datasource",
            "query": "prometheus",
            "label": "data source",
            "refresh": 1,
        }
        return [datasource, *(_variable(each) for each in self.variables)]

    def _panels(self) -> list[Json]:
        panels: list[Json] = []
        ids = count(1)
        top = 0
        for row in self.rows:
            place = {"x": 0, "y": top, "w": NUM_COLUMNS, "h": 1}
            panels.append(
                {
                    "id": next(ids),
                    "type": "row",
                    "title": row.title,
                    "collapsed": False,
                    "gridPos": place,
                    "panels": [],
                }
            )
            width = NUM_COLUMNS // min(3, len(row.panels))
            for index, panel in enumerate(row.panels):
                line, column = divmod(index, 3)
                place = {
                    "x": column * width,
                    "y": top + 1 + line * PANEL_HEIGHT,
                    "w": width,
                    "h": PANEL_HEIGHT,
                }
                panels.append(_panel(panel, number=next(ids), place=place))
            top += 1 + PANEL_HEIGHT * -(-len(row.panels) // 3)
        return panels


def _variable(variable: Variable) -> Json:
    query = f"label_values({variable.metric}, {variable.label})"
    return {
        "name": variable.name,
        "type": "query",
        "datasource": _DATASOURCE,
        "query": {"query": query, "refId": variable.name},
        "includeAll": True,
        # Also matches series without the label, such as those of a Prometheus outside Kubernetes.
        "allValue": ".*",
        "multi": True,
        "current": {"text": "All", "value": "$__all"},
        "refresh": 2,
        "sort": 1,
    }


def _panel(panel: Panel, *, number: int, place: Json) -> Json:
    custom: Json = {"fillOpacity": 10, "lineWidth": 1, "showPoints": "never"}
    if panel.stacked:
        custom |= {"stacking": {"mode": "normal", "group": "A"}, "fillOpacity": 40}
    needs = f"Empty without: {panel.needs}." if panel.needs else ""
    return {
        "id": number,
        "type": "timeseries",
        "title": panel.title,
        "description": " ".join(filter(None, (panel.text, needs))),
        "datasource": _DATASOURCE,
        "gridPos": place,
        "fieldConfig": {
            "defaults": {"unit": panel.unit, "min": 0, "custom": custom},
            "overrides": [],
        },
        "options": {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
        "targets": [
            {
                "refId": chr(ord("A") + index),
                "datasource": _DATASOURCE,
                "expr": query.promql,
                "legendFormat": query.legend or "__auto",
            }
            for index, query in enumerate(panel.queries)
        ],
    }


def rate(metric: str, *labels: str, of: str = "@") -> str:
    """Return the expression of a counter per second, summed by ``labels``."""
    return f"sum{_by(labels)} (rate({metric}{{{of}}}[$__rate_interval]))"


def quantiles(metric: str, *, of: str = "@", by: str = "") -> list[Query]:
    """Return the median, the 95th and the 99th percentile of a histogram."""
    labels = ("le", by) if by else ("le",)
    total = rate(f"{metric}_bucket", *labels, of=of)
    suffix = f" {{{{{by}}}}}" if by else ""
    return [
        Query(f"histogram_quantile({share}, {total})", f"p{round(share * 100)}{suffix}")
        for share in (0.5, 0.95, 0.99)
    ]


def mean(metric: str, *labels: str, of: str = "@") -> str:
    """Return the expression of a histogram's mean."""
    return f"{rate(f'{metric}_sum', *labels, of=of)} / {rate(f'{metric}_count', *labels, of=of)}"


def _by(labels: Sequence[str]) -> str:
    return f" by ({', '.join(labels)})" if labels else ""
