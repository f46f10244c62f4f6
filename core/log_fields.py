"""The fields of a log line, from its template: ``event=paired source=%s seconds=%.3f``.

The template is a constant of the source, so its keys are those that were written there: no value,
whatever it holds, can add or change one.
"""

import logging
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

Field = str | int | float | bool | None

_KEY: Final = re.compile(r"(?:^|\s)([a-z][a-z0-9_]*)=")
_SPEC: Final = re.compile(r"%[-+ #0]*\d*(?:\.\d+)?([a-zA-Z%])")


@dataclass(frozen=True, slots=True)
class _Part:
    """One value of a template, and how many of the record's arguments it takes."""

    key: str
    template: str
    num_arguments: int
    conversion: str
    """Of a value that is one argument and nothing else; empty otherwise."""

    def value(self, arguments: Sequence[object]) -> Field:
        """Return the argument as it is where text would show as much, else what text shows."""
        if self.conversion in {"d", "s"} and _is_plain(arguments[0]):
            return _finite(arguments[0])
        text = self.template % tuple(arguments) if arguments else self.template
        return _finite(float(text)) if self.conversion in {"e", "f", "g"} else text


@dataclass(frozen=True, slots=True)
class LogTemplate:
    """A template's leading words and values."""

    words: _Part
    values: tuple[_Part, ...]

    @property
    def event(self) -> str:
        """What the line tells, if no value named ``event`` says: the words, or the first key."""
        return "_".join(self.words.template.split()) or (self.values[0].key if self.values else "")


@lru_cache(maxsize=1024)
def parse_template(template: str) -> LogTemplate:
    """Split ``template`` at its keys. A value ends where the next key begins."""
    keys = list(_KEY.finditer(template))
    ends = [*(match.start() for match in keys), len(template)]
    words = _part("", template[: ends[0]])
    values = tuple(
        _part(match[1], template[match.end() : end])
        for match, end in zip(keys, ends[1:], strict=True)
    )
    return LogTemplate(words, values)


def fields_of(record: logging.LogRecord) -> dict[str, Field]:
    """Return the fields of a line of ours, ``event`` first.

    A record that is not what ``parse_template`` describes has its message as its event.
    """
    arguments = record.args if isinstance(record.args, tuple) else ()
    template = parse_template(record.msg) if isinstance(record.msg, str) else None
    parts = () if template is None else (template.words, *template.values)
    if template is None or sum(part.num_arguments for part in parts) != len(arguments):
        return {"event": record.getMessage()}
    if template.words.num_arguments:
        return {"event": record.getMessage()}
    fields: dict[str, Field] = {"event": template.event}
    taken = 0
    for part in template.values:
        fields[part.key] = part.value(arguments[taken : taken + part.num_arguments])
        taken += part.num_arguments
    return fields


def _part(key: str, text: str) -> _Part:
    template = text.strip()
    specs = [match for match in _SPEC.finditer(template) if match[1] != "%"]
    is_one = len(specs) == 1 and specs[0][0] == template
    # "%.200s" cuts, which only formatting does.
    conversion = specs[0][1] if is_one and not ("." in template and specs[0][1] == "s") else ""
    return _Part(key, template, len(specs), conversion)


def _is_plain(value: object) -> bool:
    return value is None or isinstance(value, (bool, int, float))


def _finite(value: object) -> Field:
    """Return ``value``, as text where JSON has no number for it."""
    assert value is None or isinstance(value, (bool, int, float))
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
