"""Several ranks of one model in one process, a thread each: they meet as processes do."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal, TypeVar

import torch

from engine.forward import PagedModel
from engine.loading import load_model
from engine.rank_group import RankGroup, RankPlace

Result = TypeVar("Result")
_one_at_a_time = threading.Lock()


def on_all_ranks(num_ranks: int, work: Callable[[int], Result]) -> list[Result]:
    """Run ``work(rank)`` for each rank at once; return the results by rank."""
    with ThreadPoolExecutor(num_ranks) as pool:
        return list(pool.map(work, range(num_ranks)))


def load_ranks(
    folder: Path,
    store: Path,
    *,
    num_ranks: int,
    dtype: Literal["float32", "bfloat16"] = "float32",
    attention: Literal["reference", "native"] = "native",
    block_size: int = 8,
    num_blocks: int = 256,
) -> list[PagedModel]:
    """Return the parts of the model in ``folder``, by rank; ``store`` must not exist yet."""

    def load(rank: int) -> PagedModel:
        _one_at_a_time.acquire()  # transformers' loading is not thread-safe

        def join(device: torch.device) -> RankGroup:
            _one_at_a_time.release()
            return RankGroup.join(store, rank=rank, size=num_ranks, device=device)

        loaded = load_model(
            folder,
            dtype=dtype,
            device="cpu",
            attention=attention,
            num_threads=1,
            place=RankPlace(rank=rank, num_ranks=num_ranks, join=join),
        )
        return PagedModel(loaded, block_size=block_size, num_blocks=num_blocks)

    return on_all_ranks(num_ranks, load)
