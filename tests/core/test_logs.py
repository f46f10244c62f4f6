"""A line of log says the same as JSON as it says as text, field by field.

The failure guarded against: a collector that takes a piece of a value for a key, a line that is no
JSON, and a line about a request that does not say which.
"""

import ast
import json
import logging
from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.ids import Attempt, RequestId
from core.log_fields import fields_of, parse_template
from core.logs import OWN_PACKAGES, RESERVED, HandledRequest, request_context, set_up_logging

ROOT = Path(__file__).parents[2]
FIELD_VALUES = (
    st.text() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.none()
)


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> Iterator[StringIO]:
    """What this process logs, as JSON of a decode worker."""
    stream = StringIO()
    monkeypatch.setenv("TQDM_DISABLE", "")
    monkeypatch.setattr("sys.stderr", stream)
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    set_up_logging("info", worker="decode-0", role="decode", log_format="json")
    yield stream
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.captureWarnings(capture=False)


def lines_of(stream: StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def fields(message: str, *arguments: object) -> dict[str, Any]:
    return fields_of(logging.LogRecord("core", 20, "x.py", 1, message, arguments, None))


def test_a_line_has_its_process_its_event_and_typed_fields(written: StringIO) -> None:
    logging.getLogger("decode.sources").info("event=paired source=%s seconds=%.3f", "p-0", 0.01234)

    (line,) = lines_of(written)
    assert line.pop("ts").endswith("+00:00")
    assert line == {
        "level": "info",
        "logger": "decode.sources",
        "worker": "decode-0",
        "role": "decode",
        "event": "paired",
        "source": "p-0",
        "seconds": 0.012,
    }


@pytest.mark.parametrize(
    ("message", "arguments", "expected"),
    [
        ("peer lost reads=%d reason=%s", (2, "x"), {"event": "peer_lost", "reads": 2}),
        ("dropped=Prefill request=%s", ("r",), {"event": "dropped", "dropped": "Prefill"}),
        ("event=storage_%s_failed blocks=%d", ("read", 3), {"event": "storage_read_failed"}),
        ("event=x reason=not for a report n=%d", (1,), {"reason": "not for a report", "n": 1}),
        ("event=x share=%d%% left=%s", (7, None), {"share": "7%", "left": None}),
        ("event=x detail=%.3s", ("abcdef",), {"detail": "abc"}),
        ("event=x seconds=%.1f at=%s", (float("nan"), float("inf")), {"seconds": "nan"}),
    ],
)
def test_fields_are_those_of_the_template(
    message: str, arguments: tuple[object, ...], expected: dict[str, Any]
) -> None:
    found = fields(message, *arguments)

    assert {key: found[key] for key in expected} == expected
    json.dumps(found, allow_nan=False)


@given(st.lists(FIELD_VALUES, min_size=2, max_size=2))
def test_no_value_adds_or_changes_a_key(values: list[object]) -> None:
    found = fields("event=failed reason=%s cause=%s", *values)

    assert list(found) == ["event", "reason", "cause"]
    assert found["event"] == "failed"
    assert [found["reason"], found["cause"]] == values


def test_a_value_that_looks_like_a_line_stays_one_value(written: StringIO) -> None:
    logging.getLogger("router").warning("event=lost reason=%s", 'x"} level=error\n{"event=y')

    (line,) = lines_of(written)
    assert line["reason"] == 'x"} level=error\n{"event=y'
    assert line["level"] == "warning"


def test_what_a_task_logs_names_its_request_and_attempt(written: StringIO) -> None:
    token = request_context.set(HandledRequest(RequestId("cmpl-1"), Attempt(2)))
    logging.getLogger("router.dispatch").info("event=finished reason=%s", "stop")
    request_context.reset(token)
    logging.getLogger("router.dispatch").info("event=serving")

    first, second = lines_of(written)
    assert (first["request"], first["attempt"]) == ("cmpl-1", 2)
    assert "request" not in second


def test_fields_that_the_process_has_itself_are_its_subject(written: StringIO) -> None:
    logging.getLogger("router.fleet").info(
        "event=worker_silent worker=%s role=%s", "p-1", "prefill"
    )

    (line,) = lines_of(written)
    assert (line["worker"], line["role"]) == ("decode-0", "decode")
    assert (line["subject_worker"], line["subject_role"]) == ("p-1", "prefill")


def test_an_exception_and_what_libraries_say_are_one_line_each(written: StringIO) -> None:
    try:
        int("two\nlines")
    except ValueError:
        logging.getLogger("engine.executor").exception("step failed step=%d", 4)
    logging.getLogger("uvicorn.error").warning("bad=%s request\n", "x")

    ours, theirs = lines_of(written)
    assert (ours["event"], ours["step"]) == ("step_failed", 4)
    assert len(ours["exception"].splitlines()) > 2
    assert ours["exception"].endswith("with base 10: 'two\\nlines'")
    assert theirs["event"] == "bad=x request\n"


def test_a_record_that_does_not_fit_its_template_is_told_as_it_is() -> None:
    assert fields("event=x %s", "y") == {"event": "x y"}
    assert fields("lost %s a=%d", "y", 1) == {"event": "lost y a=1"}
    assert fields("event=x share=50%") == {"event": "x", "share": "50%"}


def _log_calls() -> Iterator[tuple[str, list[ast.expr]]]:
    """Where each is, its template and its values."""
    for package in sorted(OWN_PACKAGES):
        for path in sorted((ROOT / package).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if (
                    isinstance(node, ast.Call)
                    and isinstance(node.func, ast.Attribute)
                    and isinstance(node.func.value, ast.Name)
                    and node.func.value.id == "log"
                ):
                    is_level_first = node.func.attr == "log"
                    yield f"{path.relative_to(ROOT)}:{node.lineno}", node.args[is_level_first:]


def test_every_log_call_of_ours_has_a_constant_template_with_fields_of_its_own() -> None:
    calls = list(_log_calls())

    assert len(calls) > 50
    for place, (message, *values) in calls:
        assert isinstance(message, ast.Constant), f"{place}: not a constant"
        assert isinstance(message.value, str), f"{place}: no text"
        template = parse_template(message.value)
        keys = [part.key for part in template.values]
        assert len(keys) == len(set(keys)), f"{place}: a key twice"
        assert template.words.num_arguments == 0, f"{place}: a value without a key"
        assert template.event, f"{place}: nothing says what happened"
        wanted = sum(part.num_arguments for part in template.values)
        has_star = any(isinstance(argument, ast.Starred) for argument in values)
        assert has_star or len(values) == wanted, f"{place}: {wanted} values"
        assert not (RESERVED - {"worker", "role"}) & set(keys), f"{place}: reserved"
