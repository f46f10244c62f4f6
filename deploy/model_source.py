"""From what the operator calls a model to a folder on this machine."""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten

from core.errors import ConfigError
from deploy.default_model import DEFAULT_MODEL_NAME, ensure_default_model

WEIGHTS_PATTERN = "*.safetensors"
TEXT_PATTERNS = ("*.json", "*.jinja", "*.model", "*.txt")
"""Of what says how text becomes tokens and back, and how large the model is."""
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
MAX_REASON_CHARS = 160
"""Of what the hub's client says, which goes on with advice for its own callers."""


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """A validated folder: config, tokenizer and, where they were asked for, safetensors."""

    path: Path
    served_name: str
    """Its name in the API, where the config sets none."""


def resolve_model(
    model: str, revision: str | None = None, *, with_weights: bool = True
) -> ModelFolder:
    """Return the local folder of ``model``, fetched first if it must be.

    Args:
        model: ``default``, a folder, or a hub id (``owner/name``).
        revision: Of a hub id: branch, tag or commit.
        with_weights: False for whoever only needs config and tokenizer, as a router does; the
            default model has its weights all the same, since it is made as a whole.

    Raises:
        ConfigError: the folder lacks a file, or the model cannot be fetched.
    """
    if model == "default":
        folder = ensure_default_model(cache_folder() / "models")
        return ModelFolder(folder, DEFAULT_MODEL_NAME)
    if not model.strip():
        raise ConfigError(f"model {model!r}: give a folder, a hub id (owner/name) or 'default'")
    path = Path(model).expanduser()
    if path.exists() or _looks_like_a_path(model):
        path, name = path.absolute(), path.absolute().name
    else:
        path, name = _fetch_from_hub(model, revision, with_weights=with_weights), model
    return ModelFolder(_checked(path, model, with_weights=with_weights), name.rsplit("/", 1)[-1])


def cache_folder() -> Path:
    """Return where fetched models are kept: ``SLUICE_CACHE``, else ``sluice`` in XDG's cache."""
    if override := os.environ.get("SLUICE_CACHE"):
        return Path(override).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "sluice"


def _looks_like_a_path(model: str) -> bool:
    return model.startswith((".", "/", "~")) or model.count("/") > 1


def _checked(path: Path, model: str, *, with_weights: bool) -> Path:
    """Return ``path`` if it holds what the engine, or the router alone, loads."""
    if not path.is_dir():
        fault = "is not a folder" if path.exists() else "does not exist"
        raise ConfigError(
            f"model {model!r}: {path} {fault}; give a folder, a hub id (owner/name) or 'default'"
        )
    missing = [
        name
        for name, present in {
            "config.json": (path / "config.json").is_file(),
            "a tokenizer (tokenizer.json)": any((path / n).is_file() for n in TOKENIZER_FILES),
            f"weights ({WEIGHTS_PATTERN})": not with_weights or any(path.glob(WEIGHTS_PATTERN)),
        }.items()
        if not present
    ]
    if missing:
        raise ConfigError(f"model folder {path} lacks {', '.join(missing)}")
    try:
        json.loads((path / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"model folder {path}: config.json cannot be read: {error}") from error
    return path


def _fetch_from_hub(model: str, revision: str | None, *, with_weights: bool) -> Path:
    # Imported here: it takes a second, and a folder or the default model needs no hub.
    from huggingface_hub import (  # noqa: PLC0415
        snapshot_download,  # pyright: ignore[reportUnknownVariableType] - of its **kwargs
    )

    # The hub's client raises many types without a common base.
    try:
        folder = snapshot_download(
            model,
            revision=revision,
            allow_patterns=[*TEXT_PATTERNS, *([WEIGHTS_PATTERN] if with_weights else [])],
        )
    except Exception as error:
        reason = shorten(str(error), MAX_REASON_CHARS, placeholder=" ...")
        raise ConfigError(
            f"model {model!r}: not a folder here, and not to be had from the model hub "
            f"({type(error).__name__}: {reason}); give a local folder or 'default'"
        ) from error
    return Path(folder)
