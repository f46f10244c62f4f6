"""How a channel begins and stays alive: the same for router, prefill and decode."""

import msgspec

from core.ids import Incarnation, WorkerId
from core.kv_layout import KVDtype, KVLayout
from core.messages.base import PROTOCOL_VERSION, Message


class Compatibility(msgspec.Struct, frozen=True):
    """What prefill and decode must agree on before any KV byte moves between them."""

    model_fingerprint: str
    """Hash of config, weights' names, shapes, sizes and leading bytes."""
    tokenizer_fingerprint: str
    kv_layout: KVLayout
    """Of one rank."""
    total_kv_heads: int
    """Of one layer, over all ranks."""
    model_dtype: KVDtype
    """In which KV is computed; ``kv_layout`` says how it is kept."""
    tensor_parallel_size: int = 1
    features: tuple[str, ...] = ("lease", "generation", "withdraw")
    """Safety features that the peer must know; a missing one is refused, never worked around."""


class PoolEndpoint(msgspec.Struct, frozen=True):
    """How a reader reaches a worker's registered pool."""

    transport: str
    metadata: bytes
    """Of the transport: opaque to all else."""
    base_address: int
    nbytes: int


class Hello(Message, frozen=True):
    """First message on a channel."""

    name: str
    """Of the client: a worker id or ``router``."""
    incarnation: Incarnation
    protocol_version: int = PROTOCOL_VERSION
    compatibility: Compatibility | None = None
    """Set by a decode worker that means to read KV."""


class Welcome(Message, frozen=True):
    """The server takes the client."""

    worker_id: WorkerId
    incarnation: Incarnation
    pools: tuple[PoolEndpoint, ...] = ()
    """Of a prefill worker's ranks, in order; of others none."""
    compatibility: Compatibility | None = None
    """Set by a prefill worker: what its blocks look like."""


class Refused(Message, frozen=True):
    """The server does not take the client; retrying does not help."""

    reason: str


class Ping(Message, frozen=True):
    """The client lives. Silence for the channel's bound means that it is lost."""


class Pong(Message, frozen=True):
    """The server lives, with this incarnation."""

    incarnation: Incarnation
