"""``sluice config check | show | reference``: a config before anything is started with it."""

import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from textwrap import fill

import yaml
from pydantic import BaseModel

from core.config import SluiceConfig
from core.config_faults import Fault
from core.config_layers import ConfigLayer, Origin, Place
from core.errors import ConfigError
from core.messages import Role
from deploy.config.advice import Advice, advise, misspelt_variables
from deploy.config.page import reference_page
from deploy.config.reference import field_at
from deploy.config.settings import read_settings
from deploy.doctor.here import missing_here, unlike_ranks
from deploy.doctor.machine import Machine
from ranks.limits import check_limits

EXIT_FAULTY = 2
MAX_EXCERPT_CHARS = 120
INDENT = " " * 8
"""Below the excerpt of a line, whose number takes as much."""


def run_config_reference() -> int:
    """Print the reference page and return 0."""
    sys.stdout.write(reference_page())
    return 0


def run_config_check(path: Path, assignments: Sequence[str]) -> int:
    """Print every error in the file, the environment and ``assignments``, and what is unwise.

    Returns 2 if there was an error, else 0.

    Raises:
        ConfigError: the file cannot be read as YAML at all.
    """
    settings = read_settings(path, {}, assignments)
    # What comes through a pipe can be read only once.
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    faults = SluiceConfig.find_faults(settings.content)
    config = None if faults else SluiceConfig.of(settings)
    if config is not None:
        faults = [*_limits(config), *unlike_ranks(config)]
    for fault in sorted(faults, key=lambda fault: _line(fault, settings)):
        text = fault.after(settings.origins_of(fault.places))
        told = _told("error", fault.places, text, settings, lines)
        sys.stdout.write("\n".join([*told, *_expected(fault.places)]) + "\n\n")
    warnings = [] if config is None else advise(config, Machine())
    if config is not None:
        warnings += [Advice(fault.places, fault.text) for fault in missing_here(config)]
    warnings += misspelt_variables(os.environ)
    for advice in warnings:
        told = _told("warning", advice.places, advice.text, settings, lines)
        sys.stdout.write("\n".join(told) + "\n\n")
    count = f"{_counted(len(faults), 'error')}, {_counted(len(warnings), 'warning')}"
    sys.stdout.write(f"{path}: {count}\n")
    return EXIT_FAULTY if faults else 0


def run_config_show(settings: ConfigLayer, role: Role | None) -> int:
    """Print the config that ``settings`` makes, as YAML, and where each value was given.

    With ``role``, what its workers go by. Values without an origin are defaults. Returns 0.

    Raises:
        ConfigError: one line that names every wrong field.
    """
    config = SluiceConfig.of(settings)
    shown = config if role is None else config.for_role(role)
    rows = list(_rows(shown, (), settings, role))
    width = max((len(text) for text, origin in rows if origin), default=0)
    for text, origin in rows:
        sys.stdout.write(f"{text:{width}}  # {origin}\n" if origin else f"{text}\n")
    return 0


def _limits(config: SluiceConfig) -> Iterator[Fault]:
    """Yield what each role's workers would refuse at their start."""
    for role, count in config.deploy.counts.items():
        try:
            if count:
                check_limits(config.for_role(role))
        except ConfigError as error:
            place = ("engine", "tensor_parallel_size")
            yield Fault(((role, *place), place), f"{role} workers", str(error))


def _line(fault: Fault, settings: ConfigLayer) -> int:
    """Return where in the file ``fault`` is first; what was given elsewhere comes after it."""
    return min(origin.line or sys.maxsize for origin in settings.origins_of(fault.places))


def _told(
    severity: str,
    places: Sequence[Place],
    text: str,
    settings: ConfigLayer,
    lines: Sequence[str],
) -> Iterator[str]:
    """Yield the line that says what is wrong, and those of the file that it is about."""
    origins = settings.origins_of(places)
    yield f"{' and '.join(map(str, origins))}: {severity}: {text}"
    for origin in origins:
        yield from _excerpt(origin, lines)


def _excerpt(origin: Origin, lines: Sequence[str]) -> Iterator[str]:
    if origin.line is None or origin.column is None or origin.line > len(lines):
        return
    margin = f"{origin.line:5} | "
    yield f"{margin}{lines[origin.line - 1][:MAX_EXCERPT_CHARS]}"
    if origin.column <= MAX_EXCERPT_CHARS:
        yield f"{'| ':>{len(margin)}}{' ' * (origin.column - 1)}^"


def _expected(places: Sequence[Place]) -> Iterator[str]:
    """Yield what each field takes, a field of both roles once."""
    for field in dict.fromkeys(map(field_at, places)):
        if field is not None:
            unit = f" ({field.unit})" if field.unit else ""
            default = f"; default {field.default}" if field.default else ""
            told = f"{field.name} takes: {field.kind}{unit}{default}. {field.meaning}"
            yield fill(told.replace("`", ""), initial_indent=INDENT, subsequent_indent=INDENT)


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _rows(
    section: BaseModel, place: Place, settings: ConfigLayer, role: Role | None
) -> Iterator[tuple[str, str]]:
    """Yield each line of YAML, and its value's origin; empty for a default."""
    indent = "  " * len(place)
    for name, value in section:
        own = (*place, name)
        if isinstance(value, BaseModel):
            yield f"{indent}{name}:", ""
            yield from _rows(value, own, settings, role)
        elif role is None or name not in {"prefill", "decode"} or place:
            origin = _origin(own, settings, role)
            yield f"{indent}{name}: {_yaml(section, name)}", origin


def _origin(place: Place, settings: ConfigLayer, role: Role | None) -> str:
    """Return where the value at ``place`` was given, part by part; empty for a default."""
    candidates = (place,) if role is None else ((role, *place), place)
    for candidate in candidates:
        known = [own for own in settings.origins if own[: len(candidate)] == candidate]
        sections = {own[:length] for own in known for length in range(len(own))}
        if known:
            told = (str(settings.origins[own]) for own in known if own not in sections)
            return ", ".join(dict.fromkeys(told))
    return ""


def _yaml(section: BaseModel, name: str) -> str:
    """Return a field's value in one line."""
    value = section.model_dump(mode="json", include={name})[name]
    text = yaml.safe_dump(value, default_flow_style=True, width=10**6, sort_keys=False)
    return text.removesuffix("...\n").strip()
