"""The README's few fields are the code's, and every file that it names is there.

The failure guarded against: the first page that a newcomer reads, with a default that is not so.
"""

import re
from pathlib import Path

from deploy.config.reference import field_at

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
MAX_FIELDS = 12
"""More belong on the reference page alone."""


def test_the_fields_of_the_readme_have_their_defaults() -> None:
    section = README.partition("## Configuration")[2].partition("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line[:3] == "| `"]
    assert 0 < len(rows) <= MAX_FIELDS
    for name, default, _ in rows:
        field = field_at(tuple(name.strip("`").split(".")))
        assert field is not None, name
        assert (field.name, default) == (name.strip("`"), field.default)
    assert "(docs/configuration.md)" in section


def test_the_files_that_the_readme_names_exist() -> None:
    links = set(re.findall(r"\]\(([^)#:]+)\)", README)) | set(
        re.findall(r"examples/[\w.-]+", README)
    )
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []
