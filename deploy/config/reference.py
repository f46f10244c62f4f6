"""What the reference page says of each field of the config, read off the models themselves."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from core.config import SluiceConfig
from core.config_layers import Place

UNITS: Final = {
    "_s": "seconds",
    "_gib": "GiB",
    "_mib": "MiB",
    "_fraction": "part of 1",
    "ratio": "part of 1",
    "_tokens": "tokens",
    "_model_len": "tokens",
    "block_size": "tokens",
    "window": "tokens",
    "sink": "tokens",
    "heads": "KV heads",
    "blocks": "blocks",
    "reserve_blocks_initial": "blocks",
    "reserve_blocks_min": "blocks",
    "_seqs": "sequences",
    "_steps": "steps",
    "_depth": "steps",
    "_threads": "threads",
    "_parallel_size": "ranks",
    "_ranges": "parts",
    "port": "port",
    "_requests": "requests",
    "_attempts": "attempts",
    "_restarts": "restarts",
    "prefill": "workers",
    "decode": "workers",
    "_surge": "workers",
}
"""By the end of a number's name; the first that fits."""
NUMBERS: Final = {"integer": "whole number", "number": "number"}
KINDS: Final = {
    "boolean": "`true` or `false`",
    "string": "text",
    "array": "list",
    "object": "fields by name",
}


@dataclass(frozen=True, slots=True)
class FieldReference:
    """One field. Texts are Markdown."""

    place: Place
    kind: str
    """Its type with its bounds."""
    unit: str
    """Empty for what is no number."""
    default: str
    """Empty where there is none."""
    meaning: str

    @property
    def name(self) -> str:
        """As in messages: ``cache.block_size``."""
        return ".".join(self.place)


@dataclass(frozen=True, slots=True)
class SectionReference:
    """One section of the file; the root's own fields are one, too."""

    name: str
    meaning: str
    fields: tuple[FieldReference, ...]


def reference() -> list[SectionReference]:
    """Return every section with its fields, in the order of the models; the root's come last."""
    schema = SluiceConfig.model_json_schema()
    sections: list[SectionReference] = []
    own: list[FieldReference] = []
    for name, field in schema["properties"].items():
        target = _section(field, schema)
        if target is None:
            own.append(_field((name,), field))
        else:
            fields = tuple(_fields((name,), target, schema))
            sections.append(SectionReference(name, _text(target), fields))
    return [*sections, SectionReference("", "Fields outside of all sections.", tuple(own))]


def field_at(place: Place) -> FieldReference | None:
    """Return the field at ``place``, which may be a role's; None: there is none."""
    own = place[1:] if place[1:] and place[0] in {"prefill", "decode"} else place
    fields = (field for section in reference() for field in section.fields)
    return next((field for field in fields if field.place == own), None)


def _fields(
    place: Place, section: Mapping[str, Any], schema: Mapping[str, Any]
) -> Iterator[FieldReference]:
    required = section.get("required", ())
    for name, field in section["properties"].items():
        own = (*place, name)
        yield _field(own, field, is_required=name in required)
        inner = _section(field, schema)
        if inner is not None:
            yield from _fields(own, inner, schema)


def _field(place: Place, field: Mapping[str, Any], *, is_required: bool = False) -> FieldReference:
    choices = field.get("anyOf", [field])
    value = next(choice for choice in choices if choice.get("type") != "null")
    is_number = value.get("type") in NUMBERS or value.get("items", {}).get("type") in NUMBERS
    return FieldReference(
        place,
        kind=_kind(value) + (", or `null`" if len(choices) > 1 else ""),
        unit=_unit(place[-1]) if is_number else "",
        default="required" if is_required else _default(field),
        meaning=_text(field),
    )


def _section(field: Mapping[str, Any], schema: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the section that a field is or may be."""
    for choice in (field, *field.get("anyOf", ())):
        if "$ref" in choice:
            return schema["$defs"][choice["$ref"].rpartition("/")[2]]
    return None


def _kind(value: Mapping[str, Any]) -> str:
    if "$ref" in value:
        return "the fields below"
    if "enum" in value:
        return ", ".join(f"`{choice}`" for choice in value["enum"])
    kind = value["type"]
    if kind == "array":
        return f"list of: {_kind(value['items'])}"
    if kind == "string" and value.get("format") == "path":
        return "absolute path"
    return f"{NUMBERS[kind]}, {_bounds(value)}" if kind in NUMBERS else KINDS[kind]


def _bounds(value: Mapping[str, Any]) -> str:
    most = f"{value['maximum']:.0f}"
    if value.get("exclusiveMinimum") != 0:
        return f"{value['minimum']:.0f} to {most}"
    return f"1 to {most}" if value["type"] == "integer" else f"above 0, up to {most}"


def _unit(name: str) -> str:
    return next((unit for end, unit in UNITS.items() if name.endswith(end)), "")


def _default(field: Mapping[str, Any]) -> str:
    default = field.get("default")
    if default is None:
        return "" if "default" in field else "`{}`"
    return f"`{str(default).lower() if isinstance(default, bool) else default}`"


def _text(described: Mapping[str, Any]) -> str:
    return " ".join(described.get("description", "").replace("``", "`").split())
