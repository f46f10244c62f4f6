"""The page of scenarios names real tests, and every scenario."""

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "scenarios.md").read_text(encoding="utf-8")
NUMBERS = {
    "A": (1, 2, 3, 4, 5, 6, 8, 9, 10, 12, 13, 15, 16, 17, 18, 19, 21, 23, 24),
    "B": (1, 2, 3, 4, 5, 6, 9, 10, 11, 12, 13, 14),
    "C": (1, 2, 3, 4, 5, 7, 8, 9, 10, 12, 13, 15, 16, 17, 19, 20, 21, 22, 23, 24, 25),
    "D": (1, 2, 4, 6, 7, 8, 9, 10, 11, 12, 14, 15, 16, 17, 18),
    "E": (1, 2, 3, 4, 5, 7, 8, 9, 11, 12, 14, 15, 16, 17, 18, 19, 20),
    "F": (1, 2, 3, 5, 6, 7, 8),
    "G": (1, 2, 4, 5, 6, 7, 8, 9, 11, 12, 13, 14, 15, 16, 17),
    "H": (1, 2, 3, 4, 6, 7, 8, 9),
    "I": (1, 2, 4, 6, 7, 8, 10),
    "J": (1, 2, 3, 4, 5),
}


def rows() -> dict[str, str]:
    """Return the last column by number."""
    found = re.findall(r"^\| ([A-J]\d\d) \| [^|]+ \| ([^|]*) \|$", PAGE, re.MULTILINE)
    assert len(found) == len(dict(found)), "a scenario is listed twice"
    return dict(found)


def existing_names() -> Iterator[str]:
    for path in ROOT.glob("tests/**/test_*.py"):
        yield from re.findall(
            r"^\s*(?:async )?def (test_\w+)", path.read_text("utf-8"), re.MULTILINE
        )


def test_every_scenario_is_on_the_page() -> None:
    expected = {f"{group}{number:02}" for group, numbers in NUMBERS.items() for number in numbers}
    assert rows().keys() == expected


def test_every_scenario_has_a_test_of_its_number_or_a_reason() -> None:
    for number, cell in rows().items():
        names = re.findall(r"`(test_\w+)`", cell)
        has_own = any(number.lower() in name.split("_") for name in names)
        assert has_own or cell.startswith("Not tested: "), number


def test_every_test_that_the_page_names_exists() -> None:
    existing = set(existing_names())
    named = {name for cell in rows().values() for name in re.findall(r"`(test_\w+)`", cell)}
    assert named <= existing, named - existing
