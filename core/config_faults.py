"""What is wrong with a config, in words: the field, its value, and what to write instead."""

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Final, LiteralString, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails, PydanticCustomError

_MAX_VALUE_CHARS = 80
_CONFLICT: Final = "conflict"


def conflict(section: BaseModel, message: LiteralString, *fields: str) -> PydanticCustomError:
    """Return the error of ``fields`` that do not go together; raise it in a validator."""
    values = {field: getattr(section, field) for field in fields}
    return PydanticCustomError(_CONFLICT, message, {"fields": values})


def describe_faults(error: ValidationError, root: type[BaseModel], *, within: str = "") -> str:
    """Return one line with every fault in ``error``, of a config of type ``root``.

    ``within`` is put before each field's name: where in the file a part of a ``root`` stands.
    """
    faults = error.errors(include_url=False)
    return "; ".join(f"{within}{_describe(fault, root)}" for fault in faults)


def _describe(fault: ErrorDetails, root: type[BaseModel]) -> str:
    path = [str(part) for part in fault["loc"]]
    context = fault.get("ctx", {})
    match fault["type"]:
        case "extra_forbidden":
            return f"{'.'.join(path)}: unknown; {_suggestion(path, root)}"
        case "finite_number":
            reason, value = "give a finite number", _shown(fault["input"])
        case "conflict":
            values: Mapping[str, object] = context["fields"]
            reason = fault["msg"]
            value = ", ".join(f"{field}={_shown(given)}" for field, given in values.items())
        case _:
            reason = fault["msg"].removeprefix("Value error, ")
            value = _shown(fault["input"])
    return f"{'.'.join(path) or 'config'}: {reason} (got {value})"


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
