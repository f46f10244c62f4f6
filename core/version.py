"""The version of this program, as in ``pyproject.toml``."""

VERSION = "0.1.0"
