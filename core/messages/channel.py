"""How a channel begins and stays alive: the same for router, prefill and decode."""

from typing import Annotated

import msgspec
from msgspec import Meta

from core.bounds import MAX_RANKS, Count, Explanation, Name, Total
from core.kv_layout import KVDtype, KVLayout
from core.messages.base import PROTOCOL_VERSION, Message
from core.messages.bounded_ids import BoundedIncarnation, BoundedWorkerId


class Compatibility(msgspec.Struct, frozen=True):
    """What prefill and decode must agree on before any KV byte moves between them."""

    model_fingerprint: Name
    """Hash of config, weights' names, shapes, sizes and leading bytes."""
    tokenizer_fingerprint: Name
    kv_layout: KVLayout
    """Of one rank."""
    total_kv_heads: Count
    """Of one layer, over all ranks."""
    model_dtype: KVDtype
    """In which KV is computed; ``kv_layout`` says how it is kept."""
    tensor_parallel_size: Count = 1
    features: Annotated[tuple[Name, ...], Meta(max_length=64)] = ("lease", "generation", "withdraw")
    """Safety features that the peer must know; a missing one is refused, never worked around."""


class PoolEndpoint(msgspec.Struct, frozen=True):
    """How a reader reaches a worker's registered pool."""

    transport: Name
    metadata: Annotated[bytes, Meta(max_length=2**20)]
    """Of the transport: opaque to all else."""
    base_address: Annotated[int, Meta(ge=0)]
    nbytes: Total


class Hello(Message, frozen=True):
    """First message on a channel."""

    name: Name
    """Of the client: a worker id or ``router``."""
    incarnation: BoundedIncarnation
    protocol_version: int = PROTOCOL_VERSION
    compatibility: Compatibility | None = None
    """Set by a decode worker that means to read KV."""


class Welcome(Message, frozen=True):
    """The server takes the client."""

    worker_id: BoundedWorkerId
    incarnation: BoundedIncarnation
    pools: Annotated[tuple[PoolEndpoint, ...], Meta(max_length=MAX_RANKS)] = ()
    """Of a prefill worker's ranks, in order; of others none."""
    compatibility: Compatibility | None = None
    """Set by a prefill worker: what its blocks look like."""


class Refused(Message, frozen=True):
    """The server does not take the client; retrying does not help."""

    reason: Explanation


class Ping(Message, frozen=True):
    """The client lives. Silence for the channel's bound means that it is lost."""


class Pong(Message, frozen=True):
    """The server lives, with this incarnation."""

    incarnation: BoundedIncarnation
