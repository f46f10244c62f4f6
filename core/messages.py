"""Messages between router and workers, and between decode and prefill workers.

One msgpack object each, tagged with its type. Every message about a request names the request and
its attempt; every message about KV names the incarnation that it was made by or is meant for. A
receiver counts and drops what names an older attempt or incarnation.

    router  ──Generate, Abort──────────────────────────▶ decode
    router  ◀─OutputBatch, Failed─────────────────────── decode
    router  ◀─Heartbeat, CacheReport─── prefill, decode
    router  ──ResetCache, ShowCache───▶ prefill, decode
    decode  ──Prefill, Renew, Reading, Released, Withdraw──▶ prefill
    decode  ◀─Ticket, Renewed, PrefillFailed──────────────── prefill
    client  ──Hello, Ping──▶ server ──Welcome or Refused, Pong──▶ client      (every channel)
"""

from typing import Literal

import msgspec

from core.errors import TransferError
from core.ids import Attempt, BlockId, Generation, Incarnation, RequestId, WorkerId
from core.kv_layout import KVLayout
from core.sampling import SamplingParams, TokenLogprobs
from core.tiers import Tier

PROTOCOL_VERSION = 1

Role = Literal["prefill", "decode"]
FinishReason = Literal["stop", "length"]


class Message(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Base of all messages: tagged with the class name."""


# Every channel


class Compatibility(msgspec.Struct, frozen=True):
    """What prefill and decode must agree on before any KV byte moves between them."""

    model_fingerprint: str
    """Hash of config, weights' names, shapes, sizes and leading bytes."""
    tokenizer_fingerprint: str
    kv_layout: KVLayout
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
    pool: PoolEndpoint | None = None


class Refused(Message, frozen=True):
    """The server does not take the client; retrying does not help."""

    reason: str


class Ping(Message, frozen=True):
    """The client lives. Silence for the channel's bound means that it is lost."""


class Pong(Message, frozen=True):
    """The server lives, with this incarnation."""

    incarnation: Incarnation


# Router and worker


class PrefillPeer(msgspec.Struct, frozen=True):
    """The prefill worker that the router chose for a request."""

    worker_id: WorkerId
    incarnation: Incarnation
    address: str


class Generate(Message, frozen=True):
    """Generate one sequence on this decode worker."""

    request_id: RequestId
    attempt: Attempt
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    output_token_ids: tuple[int, ...] = ()
    """Already sent to the client by an earlier attempt; generation goes on after them."""
    prefill: PrefillPeer | None = None
    """None: prefill here."""
    cache_salt: str = ""
    """Prefix cache entries are shared within one salt only."""


class Abort(Message, frozen=True):
    """Nobody wants the rest of this attempt."""

    request_id: RequestId
    attempt: Attempt


class RequestStats(msgspec.Struct, frozen=True):
    """How one request was served, for the operator's table and for usage."""

    path: Literal["local", "disaggregated"]
    num_cached_tokens: int = 0
    """Prompt tokens found in a prefix cache, decode's or prefill's."""
    kv_nbytes: int = 0
    """Read from prefill."""
    num_tickets: int = 0
    transport: str = ""
    prefill_s: float = 0.0
    transfer_s: float = 0.0
    num_preemptions: int = 0


class Output(msgspec.Struct, frozen=True, omit_defaults=True):
    """Next tokens of one attempt."""

    request_id: RequestId
    attempt: Attempt
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    stats: RequestStats | None = None
    """With the first and the last output."""


class OutputBatch(Message, frozen=True):
    """What one step gave for all of a router's requests: one message per step, not per token."""

    outputs: tuple[Output, ...]


class Failed(Message, frozen=True):
    """The attempt has ended without a result."""

    request_id: RequestId
    attempt: Attempt
    reason: str
    kind: Literal["request", "capacity", "transfer", "internal"]
    """Who acts: caller, router (another attempt), router (another peer), operator."""
    field: str | None = None
    """Of the request, where that is at fault."""
    peer: WorkerId | None = None
    """The prefill worker that failed, for ``transfer``."""


class WorkerLoad(msgspec.Struct, frozen=True):
    """What the router's policies weigh."""

    running: int = 0
    waiting: int = 0
    queued_tokens: int = 0
    """Prompt tokens not yet computed."""
    free_blocks: int = 0
    """FREE and CACHED."""
    total_blocks: int = 0


class Heartbeat(Message, frozen=True):
    """A worker is ready to serve at ``address``. Sent each second."""

    worker_id: WorkerId
    role: Role
    incarnation: Incarnation
    address: str
    model: str
    max_model_len: int
    load: WorkerLoad
    state: Literal["ready", "draining"] = "ready"
    metrics_address: str = ""
    cache_epoch: str = ""
    """Of the newest reset that the worker knows of."""


class ResetCache(Message, frozen=True):
    """Forget every prefix computed up to now. Answered by ``CacheReport``, done or not."""

    number: int
    """Of the question; the answer repeats it."""
    epoch: str = ""
    """What stored blocks are named after from now on, the same on every worker (see
    ``core.cache_epoch``); "": the worker names one, and shares nothing that it stores."""


class ShowCache(Message, frozen=True):
    """Tell the state of the cache. Answered by ``CacheReport``."""

    number: int
    """Of the question; the answer repeats it."""


class TierUse(msgspec.Struct, frozen=True):
    """One tier of a worker's prefix cache."""

    tier: Tier
    blocks: int
    """That a prefix can hit."""
    hit_tokens: int
    """Since the worker's start."""


class CacheState(msgspec.Struct, frozen=True):
    """A worker's KV blocks and prefix cache. Counters run from the worker's start."""

    blocks: dict[str, int]
    """By state; the sum is the pool."""
    query_tokens: int
    """Looked up in the cache, in full blocks."""
    hit_tokens: int
    evictions: int
    resets: int
    reset: Literal["none", "pending", "done"]
    """Of the last reset: pending while a block that was in use then still is."""
    tiers: tuple[TierUse, ...]
    storage: Literal["none", "pending", "done", "failed"] = "none"
    """Whether the last reset is written to storage, so that later workers keep to it; none: there
    is no storage, or was no reset. failed: what was stored may come back."""


class CacheReport(Message, frozen=True):
    """Answer to ``ResetCache`` and ``ShowCache``."""

    number: int
    worker_id: WorkerId
    role: Role
    incarnation: Incarnation
    state: CacheState


# Decode and prefill


class Prefill(Message, frozen=True):
    """Compute this request's KV and offer it by tickets, from ``first_token`` on."""

    request_id: RequestId
    attempt: Attempt
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    output_token_ids: tuple[int, ...] = ()
    first_token: int = 0
    """A multiple of the block size: decode holds the KV before it."""
    cache_salt: str = ""


class PieceId(msgspec.Struct, frozen=True, order=True):
    """One piece of a request's KV. The reader needs a *set* of these, not a count."""

    rank: int
    first_layer: int
    last_layer: int
    """Inclusive; in the group's own numbering, the whole group today."""
    chunk: int


class GroupBlocks(msgspec.Struct, frozen=True):
    """Adjacent positions of one group's block table, and the source blocks that hold them."""

    group: int
    first_index: int
    """Of the first block in the request's table: absolute, counted from token 0."""
    block_ids: tuple[BlockId, ...]
    generations: tuple[Generation, ...]
    digests: tuple[bytes, ...] = ()
    """Of the bytes of each block that this piece is about, where the source computes them."""


class FirstToken(msgspec.Struct, frozen=True):
    """The token that prefill sampled."""

    token_id: int
    logprobs: TokenLogprobs | None = None


class Ticket(Message, frozen=True):
    """The named source blocks hold the request's KV and stay until the lease ends.

    Sent only after the step that wrote them has completed on the device.
    """

    request_id: RequestId
    attempt: Attempt
    incarnation: Incarnation
    piece: PieceId
    blocks: tuple[GroupBlocks, ...]
    num_tokens: int
    """Prompt tokens covered by this and all earlier chunks."""
    lease_s: float
    """From now; a renewal never shortens it."""
    last: bool = False
    """No chunk after this one."""
    first_token: FirstToken | None = None
    """With the last ticket."""
    num_cached_tokens: int = 0
    """Of the prompt, in prefill's prefix cache."""
    prefill_s: float = 0.0
    """From the request's arrival at prefill to this ticket."""


class Renew(Message, frozen=True):
    """The reader still wants these requests' tickets."""

    sequence: int
    requests: tuple[tuple[RequestId, Attempt], ...]


class Renewed(Message, frozen=True):
    """Answer to ``Renew``: the leases that are good for ``lease_s`` more from its receipt."""

    sequence: int
    incarnation: Incarnation
    requests: tuple[tuple[RequestId, Attempt], ...]
    void: tuple[tuple[RequestId, Attempt], ...]
    """Unknown, expired or withdrawn: their bytes must not be trusted."""
    lease_s: float


class Reading(Message, frozen=True):
    """Reads against the source's pool are in progress: it must make progress for them."""

    active: bool
    """False: no read of this reader is outstanding any more."""


class Released(Message, frozen=True):
    """Every piece has landed; the source may free its blocks."""

    request_id: RequestId
    attempt: Attempt
    incarnation: Incarnation
    """Of the source that issued the tickets."""


class Withdraw(Message, frozen=True):
    """The reader will trust no byte of this request: the source frees at once.

    A read still in progress can harm only its reader, which keeps its blocks in quarantine.
    """

    request_id: RequestId
    attempt: Attempt


class PrefillFailed(Message, frozen=True):
    """The source will issue no (more) ticket for this attempt, and its old ones are void."""

    request_id: RequestId
    attempt: Attempt
    incarnation: Incarnation
    reason: str
    retryable: bool = True


AnyMessage = (
    Hello
    | Welcome
    | Refused
    | Ping
    | Pong
    | Generate
    | Abort
    | OutputBatch
    | Failed
    | Heartbeat
    | ResetCache
    | ShowCache
    | CacheReport
    | Prefill
    | Ticket
    | Renew
    | Renewed
    | Reading
    | Released
    | Withdraw
    | PrefillFailed
)

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[AnyMessage] = msgspec.msgpack.Decoder(AnyMessage)


def encode(message: AnyMessage) -> bytes:
    """Return ``message`` as one msgpack object."""
    return _encoder.encode(message)


def decode(payload: bytes) -> AnyMessage:
    """Return the message in ``payload``.

    Raises:
        TransferError: not a message of this protocol. The receiver drops it and counts.
    """
    try:
        return _decoder.decode(payload)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise TransferError(
            f"peer sent an unreadable message of {len(payload)} bytes: {error}"
        ) from error
