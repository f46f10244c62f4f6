"""The reference page is what the code takes, and says of every field what it is.

The failure guarded against: a field, default or bound that changed in the code and not on the
page, which an operator learns of when a start fails or, worse, does not.
"""

import re
from pathlib import Path

import pytest
import yaml
from pydantic import BaseModel

from core.config import SluiceConfig
from deploy.cli.parser import run
from deploy.config.page import reference_page
from deploy.config.reference import FieldReference, field_at, reference

ROOT = Path(__file__).parents[2]
FIELDS = [field for section in reference() for field in section.fields]


def defaults(section: BaseModel, above: str = "") -> dict[str, object]:
    """Return every field's default by its name, sections left out."""
    found: dict[str, object] = {}
    for name, value in section:
        if isinstance(value, BaseModel):
            found |= defaults(value, f"{above}{name}.")
        else:
            found[above + name] = value
    return found


def shown(default: object) -> str:
    if default is None:
        return ""
    return f"`{str(default).lower() if isinstance(default, bool) else default}`"


def test_the_page_is_what_the_code_takes() -> None:
    page = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    assert page == reference_page(), (
        "stale: python -m deploy.main config reference > docs/configuration.md"
    )


def test_the_pages_examples_are_configs() -> None:
    blocks = re.findall(r"```yaml\n(.*?)```", reference_page(), re.DOTALL)
    assert blocks
    for block in blocks:
        SluiceConfig.parse(yaml.safe_load(block), source="page")


def test_the_page_links_to_what_is_there() -> None:
    for target, _, heading in re.findall(r"\]\(([^)#]+)(#([^)]+))?\)", reference_page()):
        linked = ROOT / "docs" / target
        assert linked.exists()
        if heading:
            titles = re.findall(r"^#+ (.*)$", linked.read_text(encoding="utf-8"), re.MULTILINE)
            assert heading in [title.lower().replace(" ", "-") for title in titles]


def test_every_field_is_listed_with_its_default() -> None:
    listed = {field.name: field.default for field in FIELDS}
    expected = {name: shown(default) for name, default in defaults(SluiceConfig()).items()}
    assert expected.items() <= listed.items()
    inner = set(listed) - set(expected)
    assert all(name.startswith("kv_groups.head_window.") for name in inner)
    assert listed["kv_groups.head_window.window"] == "required"


@pytest.mark.parametrize("field", FIELDS, ids=lambda field: field.name)
def test_a_field_has_a_meaning_and_a_number_a_unit(field: FieldReference) -> None:
    assert re.fullmatch(r"[A-Z`].*[.]", field.meaning), "give the field a docstring"
    assert bool(field.unit) == ("number" in field.kind), "add its ending to UNITS"


@pytest.mark.parametrize("section", reference(), ids=lambda section: section.name or "root")
def test_a_section_says_what_it_is(section: object) -> None:
    assert getattr(section, "meaning", "")


@pytest.mark.parametrize(
    ("name", "kind", "unit"),
    [
        ("cache.block_size", "whole number, 1 to 2147483647", "tokens"),
        ("cache.host_tier_gib", "number, 0 to 1048576", "GiB"),
        ("transfer.lease_s", "number, above 0, up to 31536000", "seconds"),
        ("model.max_model_len", "whole number, 1 to 2147483647, or `null`", "tokens"),
        ("router.port", "whole number, 0 to 65535", "port"),
        ("engine.attention", "`auto`, `reference`, `native`", ""),
        ("security.keys_dir", "absolute path, or `null`", ""),
    ],
)
def test_types_and_bounds_are_told(name: str, kind: str, unit: str) -> None:
    field = field_at(tuple(name.split(".")))
    assert field is not None
    assert (field.kind, field.unit) == (kind, unit)


def test_a_roles_field_is_that_of_the_section() -> None:
    own = field_at(("decode", "cache", "block_size"))
    assert own is not None
    assert own.name == "cache.block_size"
    assert field_at(("decode", "cache", "blok_size")) is None
    assert field_at(("decode",)) is not None


def test_the_command_prints_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["config", "reference"]) == 0
    assert capsys.readouterr().out == reference_page()
