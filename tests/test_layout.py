"""What tests share lies in modules without ``test_``: no test file needs another one."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("tests/**/*.py"))


def imported_tests(source: str) -> Iterator[str]:
    """Yield what ``source`` imports of this project that is a test file or out of one."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = ("tests." if node.level else "") + (node.module or "")
            names = [f"{module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            package, *parts = name.split(".")
            if package.startswith("test_") or (
                package == "tests" and any(part.startswith("test_") for part in parts)
            ):
                yield name


def test_no_file_of_the_tests_imports_a_test_file() -> None:
    found = {
        path: names
        for path in FILES
        if (names := list(imported_tests((ROOT / path).read_text("utf-8"))))
    }
    assert found == {}


@pytest.mark.parametrize(
    "source",
    [
        "from tests.engine.test_runner import run",
        "from tests.engine import test_runner",
        "import tests.engine.test_runner",
        "import test_runner",
        "from test_runner import run",
        "from .test_runner import run",
        "from . import test_runner",
        "def late():\n    from tests.engine.test_runner import run",
    ],
)
def test_each_way_to_import_a_test_file_is_noticed(source: str) -> None:
    assert list(imported_tests(source))


@pytest.mark.parametrize(
    "source", ["from aiohttp.test_utils import TestServer", "from tests.engine.texts import run"]
)
def test_what_is_no_test_file_may_be_imported(source: str) -> None:
    assert not list(imported_tests(source))
