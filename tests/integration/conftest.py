"""Models that whole deployments are tested with."""

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def default_model() -> Path:
    """The folder of the default model, as ``make test`` has fetched it."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    path = cache / "sluice" / "models" / "SmolLM2-135M-Instruct"
    if not (path / "model.safetensors").exists():
        pytest.skip(f"the default model is not in {path}: run `make setup`")
    return path
