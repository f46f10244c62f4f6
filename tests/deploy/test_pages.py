"""What the pages tell an operator to look for, to set and to type is there.

The failure guarded against: at three in the morning, a runbook that says ``grep`` for a log line
that no process writes, or names a setting or a command of an earlier version.
"""

import re
from pathlib import Path

import pytest

from deploy.cli.parser import run
from deploy.config.reference import field_at

ROOT = Path(__file__).parents[2]
PACKAGES = ("core", "blockmgr", "transfer", "engine", "ranks", "prefill", "decode", "router")
PAGES = ("README.md", "docs/operations.md", "docs/architecture.md", "docs/dashboards.md")
SECTIONS = "model|cache|kv_groups|scheduler|engine|transfer|router|security|deploy|metrics"
SPAN = re.compile(r"```.*?```|`[^`\n]+`", re.DOTALL)


CHART = re.compile(r"^## Install on Kubernetes$.*?(?=^## )", re.DOTALL | re.MULTILINE)
"""Names the chart's values, which other tests hold against its schema."""


def code_of(page: str) -> str:
    """Return what is set as code on ``page``, one span per line."""
    text = CHART.sub("", (ROOT / page).read_text(encoding="utf-8"))
    return "\n".join(SPAN.findall(text))


def written_events() -> re.Pattern[str]:
    sources = [path for room in (*PACKAGES, "deploy") for path in (ROOT / room).rglob("*.py")]
    found = {
        event.replace("%s", "[a-z_]+")
        for path in sources
        for event in re.findall(r"\bevent=([a-z_]+(?:%s)?)", path.read_text(encoding="utf-8"))
    }
    return re.compile("|".join(sorted(found)))


@pytest.mark.parametrize("page", PAGES)
def test_every_log_line_that_a_page_names_is_written_by_some_process(page: str) -> None:
    written = written_events()
    named = set(re.findall(r"\bevent=([a-z_]+)", code_of(page)))
    assert {event for event in named if written.fullmatch(event) is None} == set()


@pytest.mark.parametrize("page", PAGES)
def test_every_module_that_a_page_names_by_its_path_is_there(page: str) -> None:
    rooms = "|".join((*PACKAGES, "deploy", "tests", "bench", "helm"))
    named = set(re.findall(rf"\b((?:{rooms})/[\w./]+\.py)\b", code_of(page)))
    assert {path for path in named if not (ROOT / path).is_file()} == set()


@pytest.mark.parametrize("page", PAGES)
def test_every_setting_that_a_page_names_is_one_of_the_config(page: str) -> None:
    named = set(re.findall(rf"`((?:{SECTIONS})\.(?!py`)[a-z_]+)(?=[`:=])", code_of(page)))
    assert {name for name in named if field_at(tuple(name.split("."))) is None} == set()


@pytest.mark.parametrize("page", PAGES)
def test_every_command_that_a_page_names_is_one_of_sluice(
    page: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        run(["--help"])
    commands = set(re.findall(r"^    ([a-z]+) ", capsys.readouterr().out, re.MULTILINE))
    named = set(re.findall(r"(?:^|[`/$] *)sluice ([a-z]+)", code_of(page), re.MULTILINE))
    assert "serve" in commands
    assert named - commands == set()


def missing_on_the_map(page: str) -> list[str]:
    """Return the files of ``deploy/supervision`` that the section of ``page`` about it lacks."""
    section = page.partition("\n## Who starts, drains and ends the processes\n")[2]
    named = set(re.findall(r"\b[a-z_]+\.py\b", section.partition("\n## ")[0]))
    files = {path.name for path in (ROOT / "deploy" / "supervision").glob("*.py")}
    return sorted(files - named - {"__init__.py"})


def test_every_file_that_supervises_is_on_the_map_of_the_architecture() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    assert missing_on_the_map(page) == []
    assert missing_on_the_map(page.replace("`watchdog.py`", "")) == ["watchdog.py"]
