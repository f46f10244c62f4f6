"""Whether the ranks of a worker read the model at once or one after the other."""

from pathlib import Path

FREE_MEMORY_SHARE = 0.5
"""Of this machine's free memory that may be taken; the rest is for pools, and for others."""


def loads_at_once(model_nbytes: int, *, free_nbytes: int, num_ranks: int) -> bool:
    """Return whether ``num_ranks`` whole models fit in memory at once.

    Each rank has the whole model in host memory for a moment, before it keeps its part.
    """
    return num_ranks * model_nbytes <= free_nbytes * FREE_MEMORY_SHARE


def model_nbytes(folder: Path, *, dtype: str) -> int:
    """Return at most how many bytes the weights in ``folder`` have in memory; 0: there are none."""
    stored = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    return stored * 2 if dtype == "float32" else stored  # most are stored in 16 bits
