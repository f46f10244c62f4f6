"""Small models of several families, made by the engine's tests."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))
from tiny_models import VOCAB_SIZE, make_tiny_model

__all__ = ["VOCAB_SIZE", "tiny_model"]


def tiny_model(family: str, folder: Path) -> Path:
    """Write a random model of ``family`` below ``folder`` and return its path."""
    path = folder / family
    make_tiny_model(family, path)
    return path
