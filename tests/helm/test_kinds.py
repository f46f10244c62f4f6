"""Every object is what Kubernetes, KubeRay and the Prometheus operator know, to the field."""

import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.helm.api_server import crd_folder
from tests.helm.chart import CI_VALUES, Object, render, tool

KUBERNETES = "1.36"
EVERY = pytest.mark.parametrize("values", CI_VALUES, ids=lambda path: path.stem)


def is_core(item: Object) -> bool:
    group = item["apiVersion"].partition("/")[0]
    return "." not in group or (group.endswith("k8s.io") and not group.startswith("gateway."))


def unknown_fields(node: Any, schema: Object, place: str) -> list[str]:
    """Return where ``node`` has fields, or lacks some, that the CRD does not know, or demands."""
    if "properties" not in schema and "items" not in schema:
        allowed = schema.get("enum")
        return [f"{place}: {node!r}"] if allowed and node not in allowed else []
    if isinstance(node, list):
        return [
            fault
            for number, part in enumerate(node)
            for fault in unknown_fields(part, schema["items"], f"{place}[{number}]")
        ]
    known = schema.get("properties", {})
    lacking = set(schema.get("required", [])) - set(node)
    return [f"{place} lacks {name}" for name in lacking] + [
        fault
        for name, part in node.items()
        for fault in (
            unknown_fields(part, known[name], f"{place}.{name}")
            if name in known
            else []
            if schema.get("x-kubernetes-preserve-unknown-fields")
            else [f"{place}.{name} is unknown"]
        )
    ]


@EVERY
def test_core_kinds(values: Path, tmp_path: Path) -> None:
    program = tool("kubernetes-validate", "venv/bin")
    path = tmp_path / "rendered.yaml"
    path.write_text(yaml.safe_dump_all(item for item in render(values) if is_core(item)))
    result = subprocess.run(
        [program, "--strict", "-k", KUBERNETES, path],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr


@EVERY
def test_custom_kinds(values: Path) -> None:
    schemas: dict[tuple[str, str], Object] = {}
    for path in crd_folder().glob("*.yaml"):
        crd = yaml.load(path.read_text(), yaml.CSafeLoader)
        for version in crd["spec"]["versions"]:
            key = (f"{crd['spec']['group']}/{version['name']}", crd["spec"]["names"]["kind"])
            schemas[key] = version["schema"]["openAPIV3Schema"]["properties"]["spec"]
    checked = 0
    for item in render(values):
        schema = schemas.get((item["apiVersion"], item["kind"]))
        if schema is not None:
            checked += 1
            assert unknown_fields(item["spec"], schema, item["kind"]) == []
    assert checked


def test_a_misspelt_field_would_be_seen() -> None:
    schema = {
        "properties": {"a": {"items": {"properties": {"b": {"enum": ["x"]}}}}},
        "required": ["a"],
    }
    assert unknown_fields({"a": [{"b": "x"}]}, schema, "") == []
    assert unknown_fields({"a": [{"c": 1}]}, schema, "") == [".a[0].c is unknown"]
    assert unknown_fields({"a": [{"b": "y"}]}, schema, "") == [".a[0].b: 'y'"]
    assert unknown_fields({}, schema, "") == [" lacks a"]
