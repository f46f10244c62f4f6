"""YAML to values with their places. What YAML may do and a config should not is refused."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn, cast

import yaml

from core.config_layers import ConfigLayer, Origin, Place
from core.errors import ConfigError

MAX_FILE_NBYTES = 128 * 1024
"""Many times what a config with every field and a page of comments takes."""
MAX_NODES = 4000
"""Keys and values; all fields, of both roles too, are some 400."""
MAX_DEPTH = 8
"""Of mappings and lists in each other; no field needs more than four."""


def read_config_file(path: Path) -> ConfigLayer:
    """Return what the YAML file at ``path`` says, with the line and column of each key.

    Raises:
        ConfigError: it cannot be read, or is not the YAML that a config is written in: no key
            twice, no anchors, no second document, nothing but a mapping at the top.
    """
    source = str(path)
    content, origins = parse_yaml(_text(path), source=source)
    if not isinstance(content, dict | None):
        raise ConfigError(f"config file {path}: the top level must be a mapping of sections")
    return ConfigLayer(cast("dict[str, object]", content or {}), {(): Origin(source), **origins})


def parse_yaml(text: str, *, source: str) -> tuple[object, dict[Place, Origin]]:
    """Return the value of one YAML document, and where the keys of its mappings stand.

    Raises:
        ConfigError: as ``read_config_file``; starts with ``source``, line and column.
    """
    reading = _Reading(source)
    try:
        _check_structure(text, reading)
        node = cast("yaml.Node | None", yaml.compose(text, Loader=yaml.SafeLoader))  # pyright: ignore[reportUnknownMemberType]
        value = None if node is None else reading.value(node, ())
    except yaml.MarkedYAMLError as error:
        reading.refuse(error.problem_mark or error.context_mark, f"not YAML: {_reason(error)}")
    except yaml.YAMLError as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"{source}: not YAML: {reason}") from error
    return value, reading.origins


@dataclass(slots=True)
class _Reading:
    source: str
    origins: dict[Place, Origin] = field(default_factory=dict[Place, Origin])
    _constructor: yaml.SafeLoader = field(default_factory=lambda: yaml.SafeLoader(""))

    def value(self, node: yaml.Node, place: Place) -> object:
        """Return what ``node`` stands for, and note where its keys are."""
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, place)
        if isinstance(node, yaml.SequenceNode):
            items = cast("list[yaml.Node]", node.value)
            return [self.value(item, (*place, str(index))) for index, item in enumerate(items)]
        try:
            return cast("object", self._constructor.construct_object(node))  # pyright: ignore[reportUnknownMemberType]
        except ValueError as error:  # such as the date 2026-13-13, or a number of 5000 digits
            self.refuse(node.start_mark, f"{str(node.value)[:40]!r} is no value: {error}")

    def _mapping(self, node: yaml.MappingNode, place: Place) -> dict[str, object]:
        found: dict[str, object] = {}
        for key, value in cast("list[tuple[yaml.Node, yaml.Node]]", node.value):
            if not isinstance(key, yaml.ScalarNode):
                self.refuse(key.start_mark, "a key must be a name, and this is a collection")
            name = str(key.value)
            own = (*place, name)
            if name in found:
                first = self.origins[own].line
                text = f"{'.'.join(own)} is given twice, first in line {first}; leave one out"
                self.refuse(key.start_mark, text)
            self.origins[own] = self._origin(key.start_mark)
            found[name] = self.value(value, own)
        return found

    def refuse(self, mark: yaml.Mark | None, reason: str) -> NoReturn:
        """Raise the error of what is at ``mark``."""
        where = Origin(self.source) if mark is None else self._origin(mark)
        raise ConfigError(f"{where}: {reason}")

    def _origin(self, mark: yaml.Mark) -> Origin:
        return Origin(self.source, mark.line + 1, mark.column + 1)


def _text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_FILE_NBYTES + 1)
    except OSError as error:
        raise ConfigError(f"config file {path}: {error.strerror}") from error
    if len(raw) > MAX_FILE_NBYTES:
        limit = f"{MAX_FILE_NBYTES // 1024} KiB"
        raise ConfigError(f"config file {path}: larger than {limit}; is this the right file?")
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        reason = f"byte {error.start + 1} is not UTF-8 text"
        raise ConfigError(f"config file {path}: not YAML: {reason}") from error


def _check_structure(text: str, reading: _Reading) -> None:
    """Refuse what would make a value stand elsewhere than where it is read, or recurse too deep."""
    depth = documents = nodes = 0
    events = cast("Iterable[yaml.Event]", yaml.parse(text, Loader=yaml.SafeLoader))  # pyright: ignore[reportUnknownMemberType]
    for event in events:
        if isinstance(event, yaml.DocumentStartEvent):
            documents += 1
            if documents > 1:
                reading.refuse(event.start_mark, "a second document; leave out the line ---")
        elif isinstance(event, yaml.CollectionStartEvent):
            depth += 1
            if depth > MAX_DEPTH:
                reading.refuse(event.start_mark, f"nested deeper than {MAX_DEPTH} levels")
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        nodes += isinstance(event, yaml.NodeEvent)
        if nodes > MAX_NODES:
            reading.refuse(event.start_mark, f"more than {MAX_NODES} values; is this a config?")
        if isinstance(event, yaml.NodeEvent) and event.anchor is not None:
            name = f"{'*' if isinstance(event, yaml.AliasEvent) else '&'}{event.anchor}"
            text = f"{name}: anchors and aliases are not taken; write the value at each place"
            reading.refuse(event.start_mark, text)


def _reason(error: yaml.MarkedYAMLError) -> str:
    problem = error.problem or str(error)
    if "'\\t'" in problem:
        return "a tab; indent with spaces"
    if "cannot start any token" in problem:
        return f"{problem}; put the value in quotes"
    if "mapping values are not allowed" in problem:
        return f"{problem}; check the indentation, and put values that contain ': ' in quotes"
    return problem
