"""Values of a config and where each came from; a later layer wins over an earlier one."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self, TypeGuard

Place = tuple[str, ...]
"""Where in the config a value stands: ``("cache", "block_size")``; ``()`` is all of it."""


@dataclass(frozen=True, slots=True)
class Origin:
    """A file's name with line and column, both from 1, or a flag or variable of the environment."""

    source: str
    line: int | None = None
    column: int | None = None

    def __str__(self) -> str:
        return self.source if self.line is None else f"{self.source}:{self.line}:{self.column}"


@dataclass(frozen=True, slots=True)
class ConfigLayer:
    """Some of a config's values, not yet validated, with their origins."""

    content: Mapping[str, object]
    origins: Mapping[Place, Origin]

    def origin_of(self, place: Place) -> Origin:
        """Return where the value at ``place`` was given: it itself, a part of it, or all of it."""
        if place in self.origins:
            return self.origins[place]
        for known, origin in self.origins.items():
            if place and known[: len(place)] == place:
                return origin
        for length in range(len(place) - 1, -1, -1):
            if place[:length] in self.origins:
                return self.origins[place[:length]]
        return Origin("defaults")

    def origins_of(self, places: Sequence[Place]) -> list[Origin]:
        """Return where the values at ``places`` were given: each origin once.

        Places that have none of their own count only if no other has.
        """
        own = [self.origins[place] for place in places if place in self.origins]
        return list(dict.fromkeys(own)) or [self.origin_of(places[0] if places else ())]

    def under(self, top: Self) -> "ConfigLayer":
        """Return this layer's values where ``top`` has none, and those of ``top``."""
        content = _merged(self.content, top.content)
        replaced = [place for place in top.origins if not _is_section(top, place)]
        kept = {
            place: origin
            for place, origin in self.origins.items()
            if not any(place[: len(above)] == above for above in replaced)
        }
        return ConfigLayer(content, {**kept, **top.origins})


def layer_of(place: Place, value: object, origin: Origin) -> ConfigLayer:
    """Return the layer that says of ``place``, which is not all of the config, what it is."""
    *sections, name = place
    content: dict[str, object] = {name: value}
    for section in reversed(sections):
        content = {section: content}
    return ConfigLayer(content, dict.fromkeys(_places(place, value), origin))


def _places(place: Place, value: object) -> list[Place]:
    """Return ``place``, and those of the parts of its value."""
    if not _is_mapping(value):
        return [place]
    return [place, *(part for name in value for part in _places((*place, name), value[name]))]


def _is_section(layer: ConfigLayer, place: Place) -> bool:
    value: object = layer.content
    for name in place:
        value = value[name] if _is_mapping(value) else None
    return _is_mapping(value)


def _merged(base: Mapping[str, object], top: Mapping[str, object]) -> dict[str, object]:
    merged = dict(base)
    for name, value in top.items():
        below = merged.get(name)
        if not _is_mapping(value) or below is None:
            merged[name] = value
        elif _is_mapping(below):
            merged[name] = _merged(below, value)
        # Else a section is no mapping in the lower layer: that stays, and is refused.
    return merged


def _is_mapping(value: object) -> TypeGuard[Mapping[str, object]]:
    return isinstance(value, Mapping)
