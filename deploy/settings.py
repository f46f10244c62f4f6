"""The config that a command runs with: the file's values, the environment's, the command line's."""

import os
from collections.abc import Mapping
from pathlib import Path

from core.config import SluiceConfig
from core.errors import ConfigError

POISON_VARIABLE = "SLUICE_POISON"


def load_settings(path: Path | None, overrides: Mapping[str, object]) -> SluiceConfig:
    """Return the validated config of ``path`` (None: all defaults) under ``overrides``.

    Args:
        path: A YAML file. ``SLUICE_POISON`` in the environment wins over its ``cache.poison``.
        overrides: By ``section.field``; None means that the command line does not say.

    Raises:
        ConfigError: one line, from the file, the environment or the command line.
    """
    config = SluiceConfig() if path is None else SluiceConfig.load(path)
    given = {name: value for name, value in overrides.items() if value is not None}
    poison = _poison()
    if poison is not None:
        given["cache.poison"] = poison
    if not given:
        return config
    content = config.model_dump(exclude_unset=True)
    for name, value in given.items():
        section, field = name.split(".")
        content.setdefault(section, {})[field] = value
    return SluiceConfig.parse(content, source="command line")


def _poison() -> bool | None:
    """Return what the environment says of ``cache.poison``; None: nothing."""
    value = os.environ.get(POISON_VARIABLE, "")
    if value not in {"", "0", "1"}:
        raise ConfigError(f"{POISON_VARIABLE}={value!r} in the environment: give 0 or 1")
    return value == "1" if value else None
