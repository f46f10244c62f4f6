"""The page that maps the models to the code must not rot: each name on it exists, on both sides."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.formal.spin_search import MODELS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "formal-model.md").read_text(encoding="utf-8")
SOURCES = {path.name: path.read_text(encoding="utf-8") for path in MODELS.glob("*.pml")}
TESTS = (MODELS / "test_protocol_models.py").read_text(encoding="utf-8")


def rows(heading: str) -> Iterator[list[str]]:
    """Yield the cells of each row of the first table under ``heading``."""
    section = PAGE.split(f"## {heading}\n", 1)[1].split("\n## ", 1)[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    for line in lines[2:]:
        yield [cell.strip() for cell in line.strip("|").split("|")]


def names_in(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def defined_in(path: Path) -> set[str]:
    """Return the functions of a file, and the methods as ``Class.method``."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    names = {node.name for node in tree.body if isinstance(node, functions)}
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            names |= {
                f"{node.name}.{part.name}" for part in node.body if isinstance(part, functions)
            }
    return names


def macros_of(source: str) -> set[str]:
    """Return what changes a model when it is defined, and is not defined in it."""
    asked = set(re.findall(r"#\s*(?:ifdef|ifndef)\s+(\w+)", source))
    asked |= set(re.findall(r"defined\((\w+)\)", source))
    return asked - set(re.findall(r"#\s*define\s+(\w+)", source))


@pytest.mark.parametrize(
    ("file", "name"),
    [
        (names_in(file)[0], name)
        for _, file, code in rows("Which action is which code")
        for name in names_in(code)
    ],
)
def test_each_function_on_the_page_exists(file: str, name: str) -> None:
    assert name in defined_in(ROOT / file)


def test_each_action_on_the_page_is_in_a_model() -> None:
    source = "".join(SOURCES.values())
    for action, _, _ in rows("Which action is which code"):
        for name in names_in(action):
            assert name in source, f"{name} is in no model"


def test_each_guard_of_a_model_is_on_the_page_and_taken_away_in_a_test() -> None:
    guards = {names_in(macro)[0] for macro, *_ in rows("What each guard is for")}
    worlds = {"LIVENESS", "LOOSE", "NO_READS", "DEVICE_IN_ORDER", "END_BETWEEN_STEPS", "PATIENT"}
    macros = set().union(*map(macros_of, SOURCES.values()))
    assert macros - worlds - {"NEVER_DELIVERED"} == guards
    assert all(f'"{macro}"' in TESTS for macro in macros)
