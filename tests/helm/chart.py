"""Rendering the chart with the real helm, and looking into what comes out."""

import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
CHART = ROOT / "helm" / "sluice"
CI_VALUES = tuple(sorted((CHART / "ci").glob("*-values.yaml")))
TOOLS = Path(
    os.environ.get("SLUICE_TOOLS")
    or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sluice" / "tools"
)

Object = dict[str, Any]


def tool(name: str, folder: str = "bin") -> str:
    """Return the path of a program, or skip the test."""
    found = shutil.which(name) or shutil.which(str(TOOLS / folder / name))
    if found is None:
        pytest.skip(f"{name} is neither on PATH nor in {TOOLS}: bash helm/get_tools.sh python3")
    return found


def helm(*arguments: str | Path, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [tool("helm"), *map(str, arguments)],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@cache
def rendered_text(values: str = "", name: str = "rel") -> str:
    """Return the manifests for a YAML text of values."""
    result = helm("template", name, CHART, "--namespace", "llm", "-f", "-", stdin=values or "{}")
    assert result.returncode == 0, result.stderr
    return result.stdout


def render(values: Mapping[str, Any] | Path | None = None, name: str = "rel") -> list[Object]:
    """Return every object, those of hooks and tests included."""
    text = values.read_text() if isinstance(values, Path) else yaml.safe_dump(values or {})
    return [item for item in yaml.safe_load_all(rendered_text(text, name)) if item]


def refusal(values: Mapping[str, Any]) -> str:
    """Return why helm refuses the values."""
    result = helm("template", "rel", CHART, "-f", "-", stdin=yaml.safe_dump(dict(values)))
    assert result.returncode != 0, "helm took it"
    return result.stderr


def of_kind(objects: list[Object], kind: str) -> dict[str, Object]:
    return {item["metadata"]["name"]: item for item in objects if item["kind"] == kind}


def pods(objects: list[Object]) -> dict[str, Object]:
    """Return every pod template by the name of what makes it: metadata and spec."""
    found: dict[str, Object] = {}
    for item in objects:
        name = f"{item['kind']}/{item['metadata']['name']}"
        if item["kind"] == "Pod":
            found[name] = item
        elif item["kind"] in {"Deployment", "Job"}:
            found[name] = item["spec"]["template"]
        elif item["kind"] == "RayCluster":
            found[f"{name}/head"] = item["spec"]["headGroupSpec"]["template"]
            for group in item["spec"]["workerGroupSpecs"]:
                found[f"{name}/{group['groupName']}"] = group["template"]
    return found


def containers(pod: Object) -> list[Object]:
    return [*pod["spec"].get("initContainers", []), *pod["spec"]["containers"]]


def config_of(objects: list[Object]) -> Object:
    """Return the content of the config file."""
    (text,) = (
        item["data"]["config.yaml"]
        for item in objects
        if item["kind"] == "ConfigMap" and "config.yaml" in item["data"]
    )
    return yaml.safe_load(text)


def selects(selector: Object, labels: Mapping[str, str]) -> bool:
    """Tell whether a label selector takes ``labels``."""
    wanted = selector.get("matchLabels", {} if "matchExpressions" in selector else selector)
    expressions = selector.get("matchExpressions", [])
    return all(labels.get(key) == value for key, value in wanted.items()) and all(
        labels.get(term["key"]) in term["values"] for term in expressions
    )


def references(value: Any, kind: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield (name, keys) of each Secret or ConfigMap that a pod refers to."""
    if isinstance(value, list):
        for part in value:
            yield from references(part, kind)
    if not isinstance(value, dict):
        return
    keys = (
        tuple(entry["key"] for entry in value.get(kind, {}).get("items", []))
        if (isinstance(value.get(kind), dict))
        else ()
    )
    if kind in value and isinstance(value[kind], dict):
        yield value[kind].get("secretName") or value[kind]["name"], keys
    reference = value.get(f"{kind}KeyRef")
    if reference:
        yield reference["name"], (reference["key"],)
    for part in value.values():
        yield from references(part, kind)
