"""From a worker's config to a warm engine."""

import os
from dataclasses import dataclass
from pathlib import Path

from core.config import SluiceConfig
from core.errors import ConfigError
from core.kv_layout import KVLayout
from core.messages import Compatibility
from engine.executor import StepRunner
from engine.forward import PagedModel
from engine.kv_pool import KVPool
from engine.loading import load_model
from engine.model_spec import ModelSpec
from engine.rank_group import RankPlace
from engine.runner import ModelRunner
from engine.threads import available_cores

GIB = 1024**3


@dataclass(frozen=True, slots=True)
class Engine:
    """A loaded model, its pool and its runner, warmed up."""

    spec: ModelSpec
    layout: KVLayout
    pool: KVPool
    runner: StepRunner
    max_model_len: int
    """Tokens of one sequence that the model and the pool both allow."""
    num_kv_heads: int
    """Of one layer of the whole model; ``layout`` has those of this rank."""
    rank: int = 0
    num_ranks: int = 1

    @property
    def compatibility(self) -> Compatibility:
        """What a peer must agree with before any KV moves."""
        return Compatibility(
            model_fingerprint=self.spec.fingerprint,
            tokenizer_fingerprint=self.spec.tokenizer_fingerprint,
            kv_layout=self.layout,
            total_kv_heads=self.num_kv_heads,
            model_dtype=self.spec.dtype,
            tensor_parallel_size=self.num_ranks,
        )


def start_engine(
    model_path: Path,
    config: SluiceConfig,
    *,
    place: RankPlace | None = None,
    staging_nbytes: int = 0,
) -> Engine:
    """Load the model, allocate the pool and run a first step, so that no request pays for it.

    With ``place`` it is one rank's part of an engine: all ranks must start theirs together, and
    later run the same steps in the same order. ``staging_nbytes`` are for KV that comes in another
    shape.

    Raises:
        ConfigError: the model or a size in the config cannot be used.
    """
    model, cache, engine = config.model, config.cache, config.engine
    num_ranks = 1 if place is None else place.num_ranks
    loaded = load_model(
        model_path,
        dtype=model.dtype,
        device=model.device,
        attention=engine.attention,
        num_threads=_threads_of_rank(engine.num_threads, num_ranks),
        max_model_len=model.max_model_len,
        head_window=config.kv_groups.head_window,
        place=place,
    )
    layout = loaded.spec.kv_layout(cache.block_size, cache.kv_dtype)
    num_blocks = cache.num_blocks or int(cache.memory_gib * GIB) // layout.block_nbytes
    pool_tokens = num_blocks // len(layout.groups) * layout.block_size
    if pool_tokens < 1:
        raise ConfigError(
            f"cache: {num_blocks} blocks of {layout.block_nbytes} bytes hold no sequence of a "
            f"model with {len(layout.groups)} KV groups; raise cache.memory_gib or cache.num_blocks"
        )
    _check_memory(num_ranks * num_blocks * layout.block_nbytes, device=loaded.device.type)
    paged = PagedModel(
        loaded,
        block_size=cache.block_size,
        num_blocks=num_blocks,
        kv_dtype=cache.kv_dtype,
        staging_nbytes=staging_nbytes,
    )
    runner = ModelRunner(paged, max_num_seqs=config.scheduler.max_num_seqs)
    runner.warm_up()
    return Engine(
        spec=loaded.spec,
        layout=layout,
        pool=paged.kv_pool,
        runner=runner,
        max_model_len=min(loaded.spec.max_model_len, pool_tokens),
        num_kv_heads=loaded.num_kv_heads,
        rank=0 if place is None else place.rank,
        num_ranks=num_ranks,
    )


def _threads_of_rank(num_threads: int, num_ranks: int) -> int:
    """Return one rank's part of the worker's threads; 0 of a single rank: all cores."""
    if num_ranks == 1:
        return num_threads
    return max(1, (num_threads or available_cores()) // num_ranks)


def _check_memory(pool_nbytes: int, *, device: str) -> None:
    """Refuse a pool that this machine cannot hold: the kernel would kill the worker at each start.

    Raises:
        ConfigError: names the size and the field.
    """
    if device != "cpu":
        return
    machine_nbytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if pool_nbytes > machine_nbytes:
        raise ConfigError(
            f"cache: a pool of {pool_nbytes / GIB:.1f} GiB does not fit in this machine's "
            f"{machine_nbytes / GIB:.1f} GiB; lower cache.memory_gib or cache.num_blocks"
        )
