"""The README's configuration table is what the code takes.

The failure guarded against: a key or default that changed in the code and not in the page, which
an operator learns of when a start fails or, worse, does not.
"""

from pathlib import Path

from pydantic import BaseModel

from core.config import SluiceConfig

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")


def keys_and_defaults() -> dict[str, object]:
    found: dict[str, object] = {}
    for section, value in SluiceConfig():
        if isinstance(value, BaseModel):
            found |= {f"{section}.{key}": default for key, default in value}
        else:
            found[section] = value
    return found


def shown(default: object) -> str:
    if default is None:
        return ""
    return f"`{str(default).lower() if isinstance(default, bool) else default}`"


def test_the_readme_lists_every_key_with_its_default() -> None:
    expected = {f"`{key}`": shown(default) for key, default in keys_and_defaults().items()}
    rows = [line.strip("|").split("|") for line in README.splitlines() if line.startswith("| `")]
    listed = {row[0].strip(): row[1].strip() for row in rows if len(row) == 3}
    assert listed == expected
