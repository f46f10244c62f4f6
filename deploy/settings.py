"""The config that a command runs with: the file's values, then the command line's."""

from collections.abc import Mapping
from pathlib import Path

from core.config import SluiceConfig


def load_settings(path: Path | None, overrides: Mapping[str, object]) -> SluiceConfig:
    """Return the validated config of ``path`` (None: all defaults) under ``overrides``.

    Args:
        path: A YAML file.
        overrides: By ``section.field``; None means that the command line does not say.

    Raises:
        ConfigError: one line, from the file or from the command line.
    """
    config = SluiceConfig() if path is None else SluiceConfig.load(path)
    given = {name: value for name, value in overrides.items() if value is not None}
    if not given:
        return config
    content = config.model_dump(exclude_unset=True)
    for name, value in given.items():
        section, field = name.split(".")
        content.setdefault(section, {})[field] = value
    return SluiceConfig.parse(content, source="command line")
