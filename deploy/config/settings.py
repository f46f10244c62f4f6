"""The config that a command runs with: defaults < file < environment < command line."""

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import Annotated, Final, Literal, TypeGuard, Union, get_args, get_origin

from pydantic import BaseModel

from core.config import SluiceConfig
from core.config_file import parse_yaml, read_config_file
from core.config_layers import ConfigLayer, Origin, Place, layer_of
from core.errors import ConfigError

PREFIX: Final = "SLUICE__"
"""Of a field's variable: ``SLUICE__CACHE__BLOCK_SIZE``."""
POISON_VARIABLE: Final = "SLUICE_POISON"


def load_settings(
    path: Path | None,
    flags: Mapping[str, object],
    assignments: Sequence[str] = (),
) -> SluiceConfig:
    """Return the validated config of ``path`` (None: all defaults) under all that wins over it.

    Args:
        path: A YAML file.
        flags: By ``section.field``, whose last part is the flag's name; None means that the
            command line does not say.
        assignments: What ``--set`` gave, as ``section.field=value``; flags win over them.

    Raises:
        ConfigError: one line, with the file's line, the variable or the flag of each fault.
    """
    return SluiceConfig.of(read_settings(path, flags, assignments))


def read_settings(
    path: Path | None,
    flags: Mapping[str, object],
    assignments: Sequence[str] = (),
) -> ConfigLayer:
    """Return what ``load_settings`` validates, with the origin of each value.

    Raises:
        ConfigError: the file is no YAML, or a variable or ``--set`` names no field.
    """
    settings = ConfigLayer({}, {}) if path is None else read_config_file(path)
    for layer in (
        *environment_layers(os.environ),
        *(_assignment(assignment) for assignment in assignments),
        *_flag_layers(flags),
    ):
        settings = settings.under(layer)
    return settings


def environment_layers(environment: Mapping[str, str]) -> list[ConfigLayer]:
    """Return what variables say of the config. An empty one says nothing.

    Raises:
        ConfigError: names the variable and how to write it.
    """
    layers = [] if (poison := _poison(environment)) is None else [poison]
    for name in sorted(environment):
        if name.startswith(PREFIX) and environment[name]:
            source = f"environment variable {name}"
            parts = name.removeprefix(PREFIX).split("__")
            if name != name.upper() or not all(parts):
                raise ConfigError(f"{source}: write it in capitals, such as {PREFIX}ROUTER__PORT")
            place = tuple(part.lower() for part in parts)
            value = parse_value(environment[name], place, source=source)
            layers.append(layer_of(place, value, Origin(source)))
    return layers


def parse_value(text: str, place: Place, *, source: str) -> object:
    """Return the value of the field at ``place`` that ``text`` gives, as YAML would.

    A field that takes text has it as it is, even where YAML would see a number, but for ``null``
    and for what is in quotes.

    Raises:
        ConfigError: it is not YAML.
    """
    is_quoted = text[:1] in {"'", '"'}
    if _takes_text(place) and not is_quoted and text != "null":
        return text
    try:
        return parse_yaml(text, source=source)[0]
    except ConfigError as error:
        reason = re.sub(r"^(:\d+:\d+)?: ", "", str(error).removeprefix(source))
        raise ConfigError(f"{source}: {reason} (got {text!r:.80})") from error


def _poison(environment: Mapping[str, str]) -> ConfigLayer | None:
    value = environment.get(POISON_VARIABLE, "")
    if value not in {"", "0", "1"}:
        raise ConfigError(f"{POISON_VARIABLE}={value!r} in the environment: give 0 or 1")
    origin = Origin(f"environment variable {POISON_VARIABLE}")
    return layer_of(("cache", "poison"), value == "1", origin) if value else None


def _assignment(assignment: str) -> ConfigLayer:
    name, equals, text = assignment.partition("=")
    place = tuple(name.strip().split("."))
    if not equals or not all(place):
        raise ConfigError(
            f"--set {assignment}: write section.field=value, such as cache.block_size=32"
        )
    source = f"--set {'.'.join(place)}"
    return layer_of(place, parse_value(text.strip(), place, source=source), Origin(source))


def _flag_layers(flags: Mapping[str, object]) -> list[ConfigLayer]:
    layers: list[ConfigLayer] = []
    for name, value in flags.items():
        if value is not None:
            place = tuple(name.split("."))
            layers.append(layer_of(place, value, Origin(f"--{place[-1].replace('_', '-')}")))
    return layers


def _takes_text(place: Place) -> bool:
    """Whether the field at ``place`` is text and nothing else; False where there is none."""
    own = place[1:] if place[0] in {"prefill", "decode"} else place
    kind: object = SluiceConfig
    for name in own:
        fields = kind.model_fields if _is_section(kind) else {}
        field = fields.get(name)
        if field is None:
            return False
        kind = next((k for k in _kinds(field.annotation) if _is_section(k)), field.annotation)
    return set(_kinds(kind)) <= {str, Path}


def _is_section(kind: object) -> TypeGuard[type[BaseModel]]:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def _kinds(annotation: object) -> list[object]:
    """Return the types that a field's value may have, None left out."""
    if get_origin(annotation) is Annotated:
        return _kinds(get_args(annotation)[0])
    if get_origin(annotation) in {UnionType, Union}:
        return [kind for part in get_args(annotation) for kind in _kinds(part)]
    if get_origin(annotation) is Literal:
        return [type(choice) for choice in get_args(annotation)]
    return [] if annotation is type(None) else [annotation]
