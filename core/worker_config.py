"""How a worker computes, keeps and moves KV: the sections that roles may have otherwise."""

from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from core.config_faults import conflict
from core.config_fields import (
    MAX_GIB,
    ConfigSection,
    NonNegativeInt,
    PositiveGib,
    PositiveInt,
    Seconds,
)
from core.storage_url import checked_storage_url


class ModelConfig(ConfigSection):
    """Which model, and in which precision."""

    model: str = "default"
    """A folder with config, tokenizer and safetensors, a hub id, or ``default``."""
    served_name: str | None = None
    """Name in the API; by default the folder's or hub id's last part."""
    revision: str | None = None
    """Of a hub id: a branch, tag or commit; by default its main branch."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Of weights, activations and KV."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """``auto`` takes CUDA where there is one."""
    max_model_len: PositiveInt | None = None
    """Prompt and output tokens of one request; by default what the model's config allows."""


class CacheConfig(ConfigSection):
    """KV pool of one worker."""

    block_size: PositiveInt = 16
    """Token slots in one block. Prefill and decode may differ: one a multiple of the other; with
    sliding windows decode's must not be the larger one."""
    num_blocks: PositiveInt | None = None
    """Blocks in the pool; by default as many as fit in ``memory_gib``."""
    memory_gib: PositiveGib = 1.0
    """Size of the pool, with several ranks of each one's, where ``num_blocks`` is not set."""
    kv_dtype: Literal["auto", "float8_e4m3"] = "auto"
    """Of keys and values in the pool; by default the model's. ``float8_e4m3`` keeps about twice the
    tokens and sends half the bytes, for a small loss of exactness; decode workers may have it where
    prefill workers do not."""
    prefix_caching: bool = True
    """Whether equal prompt beginnings are computed once."""
    zero_on_allocate: bool = False
    """Clear a block before its first use; blocks that a read fills are never cleared."""
    poison: bool = False
    """Fill free blocks with a pattern and verify it: a stale write stops the worker, named."""
    quarantine_fraction: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Above this part of the pool in QUARANTINED, the oldest peer's endpoint is torn down."""
    host_tier_gib: Annotated[float, Field(ge=0, le=MAX_GIB)] = 0.0
    """Host memory of one worker for blocks that leave its pool; 0: none."""
    host_copy_fraction: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Part of the pool that may wait at once for copies to host memory; more is not copied."""
    storage_url: Annotated[str, AfterValidator(checked_storage_url)] | None = None
    """Where blocks are kept beyond host memory and beyond restarts, by all workers of a model:
    ``file:///dir``, ``s3://bucket/prefix``, ``gs://...``, ``az://...``, or for tests
    ``memory:///``; by default nowhere. Needs ``host_tier_gib``."""
    storage_gib: PositiveGib | None = None
    """Of one model's blocks in storage: above it, those written first are deleted; by default
    nothing is ever deleted."""
    storage_timeout_s: Seconds = 5.0
    """Of one look-up, one read and one write. A request waits for a look-up and a read at most."""
    storage_staging_mib: PositiveInt = 256
    """Bytes on their way to or from storage; a write that would exceed it is not begun."""

    @model_validator(mode="after")
    def _tiers_have_what_they_need(self) -> Self:
        if self.host_tier_gib and not self.prefix_caching:
            message = "host_tier_gib keeps prefixes: it needs prefix_caching: true"
            raise conflict(self, message, "host_tier_gib", "prefix_caching")
        if self.storage_url is not None and not self.host_tier_gib:
            message = (
                "storage_url needs host_tier_gib > 0: blocks reach storage through host memory"
            )
            raise conflict(self, message, "storage_url", "host_tier_gib")
        if self.storage_gib is not None and self.storage_url is None:
            message = "storage_gib bounds what is in storage: it needs storage_url"
            raise conflict(self, message, "storage_gib", "storage_url")
        return self


class SchedulerConfig(ConfigSection):
    """Batching of one worker."""

    max_num_seqs: PositiveInt = 64
    """Sequences in one step."""
    max_batch_tokens: PositiveInt = 512
    """Tokens in one step: decode tokens first, prefill chunks in what is left."""
    overlap_depth: Annotated[int, Field(ge=1, le=4)] = 2
    """Steps in flight: 2 schedules step N+1 before step N's output is read."""
    reserve_blocks_initial: NonNegativeInt = 4
    """Blocks that admission keeps free per running sequence and KV group after a preemption."""
    reserve_blocks_min: NonNegativeInt = 1
    """What that reserve decays to, and starts with; at most ``reserve_blocks_initial``. With 0,
    admission is relaxed until the first preemption and once the reserve has decayed: a newcomer
    needs just its own blocks."""
    reserve_decay_steps: PositiveInt = 64
    """Steps without a preemption after which the reserve gets one block smaller."""

    @model_validator(mode="after")
    def _reserve_decays_downwards(self) -> Self:
        if self.reserve_blocks_min > self.reserve_blocks_initial:
            message = "reserve_blocks_min must be at most reserve_blocks_initial"
            raise conflict(self, message, "reserve_blocks_min", "reserve_blocks_initial")
        return self


class EngineConfig(ConfigSection):
    """How a worker computes."""

    num_threads: NonNegativeInt = 0
    """CPU threads of one worker, which its ranks share; 0: all cores."""
    attention: Literal["auto", "reference", "native"] = "auto"
    """``native`` is the compiled CPU kernel; ``reference`` is plain torch."""
    tensor_parallel_size: Annotated[int, Field(gt=0, le=1024)] = 1
    """Ranks of one worker, each a process with its part of every layer, all on one node."""


class HeadWindowConfig(ConfigSection):
    """Some KV heads of every layer with full attention see just their window and the sinks.

    This changes what the model computes: for models trained so, and for measuring.
    """

    window: Annotated[int, Field(gt=0, le=2**30)]
    """Tokens that such a head reaches back, the current one included."""
    sink: Annotated[int, Field(ge=0, le=2**30)] = 0
    """First tokens that such a head sees beside its window."""
    ratio: Annotated[float, Field(ge=0, le=1)] | None = None
    """Part of a layer's KV heads that have the window, the first ones; 0: none."""
    heads: tuple[NonNegativeInt, ...] | None = None
    """The KV heads of a layer that have the window, instead of ``ratio``."""

    @model_validator(mode="after")
    def _selects_heads_once(self) -> Self:
        if (self.ratio is None) == (self.heads is None):
            message = "head_window needs either ratio or heads"
            raise ValueError(message)
        if self.heads is not None and (not self.heads or sorted(set(self.heads)) != [*self.heads]):
            message = f"heads={list(self.heads)} must be ascending, each once, and at least one"
            raise ValueError(message)
        return self


class KVGroupsConfig(ConfigSection):
    """Attention spans beyond those of the model's own config. Both sides of a transfer agree."""

    head_window: HeadWindowConfig | None = None
    """Some KV heads of every layer see just a window; by default none but the model's own."""


class TransferConfig(ConfigSection):
    """How KV moves from prefill to decode workers."""

    transport: Literal["auto", "ucx", "nixl", "ucxx"] = "auto"
    """How reads are posted; the best that loads here by default. Both sides must agree."""
    layer_ranges: Annotated[int, Field(gt=0, le=1024)] = 4
    """Parts in which the last chunk of a prompt is offered, while later layers still compute."""
    load_failure: Literal["recompute", "fail"] = "recompute"
    """When a request's KV does not come: ``recompute`` prefills it on the decode worker, ``fail``
    ends the attempt, and the router tries another one."""
    lease_s: Seconds = 30.0
    """How long a ticket is good, and by how much a renewal extends it."""
    renew_interval_s: Seconds = 5.0
    """How often a reader renews its leases; at most half of ``lease_s``."""
    prefill_timeout_s: Seconds = 120.0
    """From the request to a prefill worker until its last ticket."""
    read_timeout_s: Seconds = 30.0
    """From posting a read until it is terminal; then the endpoint is torn down."""
    checksums: bool = False
    """Send a digest of every block with its ticket, and compare what has arrived with it. Costs
    about 1 s of each side's event loop per GB; for finding bad links and memory."""
    pump_interval_s: Seconds = 0.0002
    """Between progress calls while a read is outstanding; nothing runs while none is. Unused where
    the transport can wait."""
    staging_mib: PositiveInt = 64
    """Of one decode rank, for KV of prefill workers whose blocks have another shape, on its way
    into blocks: a read waits for room, and one block must fit. Unused where shapes are equal."""
    max_inflight_mib: PositiveInt = 64
    """Bytes of posted reads that are not over, above which one decode rank posts no more; a quarter
    for each prefill worker. What is posted cannot be overtaken or taken back."""

    @model_validator(mode="after")
    def _renews_in_time(self) -> Self:
        if self.renew_interval_s * 2 > self.lease_s:
            message = "renew_interval_s must be at most half of lease_s"
            raise conflict(self, message, "renew_interval_s", "lease_s")
        return self
