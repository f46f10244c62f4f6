"""What is wrong with a config, in words: the field, its value, and what to write instead."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Final, LiteralString, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails, PydanticCustomError

from core.config_fields import NAME_PATTERN
from core.config_layers import Origin, Place

_MAX_VALUE_CHARS = 80
_CONFLICT: Final = "conflict"
_WORDS_OF_PATTERN: Final = {
    NAME_PATTERN: "give 1 to 63 lower-case letters, digits and hyphens, no hyphen first or last"
}


def conflict(section: BaseModel, message: LiteralString, *fields: str) -> PydanticCustomError:
    """Return the error of ``fields`` that do not go together; raise it in a validator."""
    values = {field: getattr(section, field) for field in fields}
    return PydanticCustomError(_CONFLICT, message, {"fields": values})


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that is wrong with a config."""

    places: tuple[Place, ...]
    """The field, or all fields that do not go together."""
    name: str
    """Of the field, or of whose it is."""
    reason: str
    """What is wrong, the value, and what to write instead."""

    @property
    def text(self) -> str:
        """All of it."""
        return f"{self.name}: {self.reason}"

    def after(self, origins: Sequence[Origin]) -> str:
        """Return the text as it follows ``origins``: the name only if it is not the end of them."""
        is_named = len(origins) == 1 and str(origins[0]).endswith(f" {self.name}")
        return self.reason if is_named else self.text


def list_faults(error: ValidationError, root: type[BaseModel]) -> list[Fault]:
    """Return every fault in ``error``, of a config of type ``root``."""
    return [_fault(details, root) for details in error.errors(include_url=False)]


def _fault(details: ErrorDetails, root: type[BaseModel]) -> Fault:
    # A wrong key of a mapping comes as a part of its own.
    path = tuple(str(part) for part in details["loc"] if part != "[key]")
    name = ".".join(path) or "config"
    context = details.get("ctx", {})
    places = (path,)
    match details["type"]:
        case "extra_forbidden":
            return Fault(places, name, f"unknown; {_suggestion([*path], root)}")
        case "finite_number":
            reason, value = "give a finite number", _shown(details["input"])
        case "string_pattern_mismatch":
            reason = _WORDS_OF_PATTERN.get(context["pattern"], details["msg"])
            value = _shown(details["input"])
        case "conflict":
            values: Mapping[str, object] = context["fields"]
            places = tuple((*path, field) for field in values)
            reason = details["msg"]
            value = ", ".join(f"{field}={_shown(given)}" for field, given in values.items())
        case "model_type" | "dict_type":
            reason = "must be a mapping of fields; without any, leave it out"
            value = _shown(details["input"])
        case _:
            reason = details["msg"].removeprefix("Value error, ")
            value = _shown(details["input"])
    return Fault(places, name, f"{reason} (got {value})")


def _shown(value: object) -> str:
    return f"{value!r:.{_MAX_VALUE_CHARS}}"


def _suggestion(path: list[str], root: type[BaseModel]) -> str:
    """Return what may be meant by the unknown ``path``: a name beside it, or of another place."""
    places = _places(root)
    *section, name = path
    beside = [place[-1] for place in places if list(place[:-1]) == section]
    near = get_close_matches(name.lower(), beside, n=1)
    if near:
        return f"did you mean {'.'.join([*section, near[0]])}?"
    elsewhere = [".".join(place) for place in places if place[-1] == name]
    if elsewhere:
        return f"did you mean {elsewhere[0]}?"
    return f"known here: {', '.join(beside)}"


def _places(root: type[BaseModel]) -> list[tuple[str, ...]]:
    """Return the paths of all sections and fields."""
    places: list[tuple[str, ...]] = []
    for name, field in root.model_fields.items():
        places.append((name,))
        for kind in (field.annotation, *get_args(field.annotation)):  # a section, or one or None
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                places += [(name, *place) for place in _places(kind)]
    return places
