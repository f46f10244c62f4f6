"""What the chart ships is what the code says, Grafana can read it, and it names real metrics.

The failure guarded against: a panel or an alert over a metric that was renamed, which shows
nothing and fires never, and looks as if all were well.
"""

import ast
import json
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.observability.files import DASHBOARDS, render
from deploy.observability.grafana import SELECTORS, Dashboard
from tests.observability.alerts import ALERTS
from tests.observability.prometheus import promtool

ROOT = Path(__file__).parents[2]
CHART = ROOT / "helm" / "sluice"
PACKAGES = ("core", "blockmgr", "transfer", "prefill", "decode", "router", "deploy")
PAGES = ("docs/operations.md", "docs/dashboards.md", "README.md")
NAME = re.compile(r"\bsluice_[a-z0-9_]+")
EXTERNAL = re.compile(r"\bDCGM_FI_[A-Z_]+")
SUFFIXES = ("_bucket", "_sum", "_count", "_total", "_info", "_created")


def metric_patterns() -> set[str]:
    """Return the names in the source's strings, a replaced field standing for anything."""
    found: set[str] = set()
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            if "observability" in path.parts or path.name.startswith("top"):
                continue  # they read metrics: a name there proves nothing
            for node in ast.walk(ast.parse(path.read_text())):
                text = _text(node)
                if text is not None and re.fullmatch(r"sluice_[a-z0-9_.*]+", text):
                    found.add(text)
    return found


def _text(node: ast.AST) -> str | None:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        parts = (p.value if isinstance(p, ast.Constant) else ".*" for p in node.values)
        return "".join(map(str, parts))
    return None


def unknown(names: Iterable[str], patterns: Iterable[str]) -> set[str]:
    """Return those ``names`` that no metric of the source gives."""
    known = re.compile("|".join(rf"(?:{each})" for each in sorted(patterns)))
    ends = "|".join(SUFFIXES)
    stripped = {name: re.sub(rf"({ends})$", "", name) for name in names}
    return {
        name
        for name, base in stripped.items()
        if not (known.fullmatch(name) or known.fullmatch(base) or known.fullmatch(f"{base}_total"))
    }


def test_the_charts_files_are_those_that_the_code_generates() -> None:
    for name, text in render().items():
        assert (CHART / name).read_text() == text, "run: python -m deploy.observability helm/sluice"
    shipped = {path.name for path in (CHART / "dashboards").iterdir()}
    assert shipped == {f"{each.uid}.json" for each in DASHBOARDS}


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda each: each.uid)
def test_every_metric_of_a_dashboard_exists(dashboard: Dashboard) -> None:
    text = json.dumps(dashboard.to_json())
    assert not unknown(NAME.findall(text), metric_patterns())


def test_every_metric_of_an_alert_exists() -> None:
    text = " ".join(alert.expr for alert in ALERTS)
    assert not unknown(NAME.findall(text), metric_patterns())


@pytest.mark.parametrize("page", PAGES)
def test_every_metric_that_a_page_names_exists(page: str) -> None:
    names = set(NAME.findall((ROOT / page).read_text()))
    assert not unknown({name for name in names if not name.endswith("_")}, metric_patterns())


def test_a_metric_that_nothing_exports_is_noticed() -> None:
    assert unknown({"sluice_kv_leeses", "sluice_kv_leases"}, metric_patterns()) == {
        "sluice_kv_leeses"
    }


def test_every_metric_of_the_source_is_on_a_dashboard() -> None:
    shown = " ".join(query.expr for d in DASHBOARDS for p in d.panels for query in p.queries)
    bases = {re.sub(r"_total$", "", name) for name in metric_patterns() if ".*" not in name}
    aside = {
        "sluice_build",  # a variable's values
        "sluice_slo_seconds",  # an alert's threshold
        "sluice_time_per_output_token_seconds",  # beside the time between tokens
        "sluice_native",  # a C++ extension's name
        "sluice_paged",  # an attention implementation's
        "sluice_mask_observer",
    }
    assert {base for base in bases - aside if base not in shown} == set()


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda each: each.uid)
def test_panels_lie_beside_each_other_and_ids_are_unique(dashboard: Dashboard) -> None:
    panels = dashboard.to_json()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (x, y)
        for place in (panel["gridPos"] for panel in panels)
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda each: each.uid)
def test_a_dashboard_is_one_by_grafanas_own_types(dashboard: Dashboard) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    path = cache / "sluice" / "grafana" / "dashboard.schema.json"
    if not path.exists():
        pytest.skip(f"no {path}: run tests/observability/grafana_schema.sh (npm)")
    schema: dict[str, Any] = json.loads(path.read_text())
    jsonschema.validate(dashboard.to_json(), schema)


def test_prometheus_reads_every_expression_of_the_dashboards(tmp_path: Path) -> None:
    queries = [query for d in DASHBOARDS for panel in d.panels for query in panel.queries]
    records = [
        {"record": f"query:{number}", "expr": query.whole()} for number, query in enumerate(queries)
    ]
    path = tmp_path / "queries.yaml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "queries", "rules": records}]}))
    assert f"{len(records)} rules found" in promtool("check", "rules", path)


def test_an_expression_names_only_variables_that_its_dashboard_has() -> None:
    for dashboard in DASHBOARDS:
        has = {"datasource", "__rate_interval", *(each.name for each in dashboard.variables)}
        for panel in dashboard.panels:
            for query in panel.queries:
                assert set(re.findall(r"\$(\w+)", query.promql)) <= has, panel.title
                assert not any(f"{{{each}" in query.promql for each in SELECTORS), panel.title
