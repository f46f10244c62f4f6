"""Between router and workers: requests, their outputs, and heartbeats."""

from typing import Annotated, Final, Literal

import msgspec

from core.bounds import Count, Explanation, Line, Name, Seconds, TokenIds, Total
from core.messages.base import Message, Role
from core.messages.bounded_ids import (
    BoundedAttempt,
    BoundedIncarnation,
    BoundedRequestId,
    BoundedWorkerId,
)
from core.sampling import SamplingParams, TokenLogprobs

FinishReason = Literal["stop", "length"]
MAX_PEERS: Final = 4096
MAX_TROUBLES: Final = 8


class PrefillPeer(msgspec.Struct, frozen=True):
    """The prefill worker that the router chose for a request."""

    worker_id: BoundedWorkerId
    incarnation: BoundedIncarnation
    address: Name


class Peers(Message, frozen=True):
    """The prefill workers that this router knows: decode pairs with them before it is asked to."""

    prefill: Annotated[tuple[PrefillPeer, ...], msgspec.Meta(max_length=MAX_PEERS)]


class Generate(Message, frozen=True):
    """Generate one sequence on this decode worker."""

    request_id: BoundedRequestId
    attempt: BoundedAttempt
    prompt_token_ids: TokenIds
    sampling: SamplingParams
    output_token_ids: TokenIds = ()
    """Already sent to the client by an earlier attempt; generation goes on after them."""
    prefill: PrefillPeer | None = None
    """None: prefill here."""
    cache_salt: Name = ""
    """Prefix cache entries are shared within one salt only."""


class Abort(Message, frozen=True):
    """Nobody wants the rest of this attempt."""

    request_id: BoundedRequestId
    attempt: BoundedAttempt


class RequestStats(msgspec.Struct, frozen=True):
    """How one request was served, for the operator's table and for usage."""

    path: Literal["local", "disaggregated"]
    """Where the prompt was computed: on decode, or on prefill."""
    num_cached_tokens: Count = 0
    """Prompt tokens found in a prefix cache, decode's or prefill's."""
    kv_nbytes: Total = 0
    """Read from prefill."""
    num_tickets: Count = 0
    transport: Name = ""
    prefill_s: Seconds = 0.0
    transfer_s: Seconds = 0.0
    """From the first read to the last landing, waiting for later chunks included."""
    num_preemptions: Count = 0
    recomputed: bool = False
    """Its KV was to come from prefill and did not: the prompt was computed on decode instead."""


class Output(msgspec.Struct, frozen=True, omit_defaults=True):
    """Next tokens of one attempt."""

    request_id: BoundedRequestId
    attempt: BoundedAttempt
    token_ids: TokenIds
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    stats: RequestStats | None = None
    """With the first and the last output."""


class OutputBatch(Message, frozen=True):
    """What one step gave for all of a router's requests: one message per step, not per token."""

    outputs: tuple[Output, ...]


class Failed(Message, frozen=True):
    """The attempt has ended without a result."""

    request_id: BoundedRequestId
    attempt: BoundedAttempt
    reason: Explanation
    kind: Literal["request", "capacity", "transfer", "internal", "draining"]
    """Who acts: caller, router (another attempt), router (another peer), operator, router (another
    worker, since this one takes nothing new)."""
    field: Name | None = None
    """Of the request, where that is at fault."""
    peer: BoundedWorkerId | None = None
    """The prefill worker that failed, for ``transfer``."""


class WorkerLoad(msgspec.Struct, frozen=True):
    """What the router's policies weigh."""

    running: Count = 0
    waiting: Count = 0
    queued_tokens: Total = 0
    """Prompt tokens not yet computed."""
    free_blocks: Count = 0
    """FREE and CACHED."""
    total_blocks: Count = 0


class DesiredWorkers(msgspec.Struct, frozen=True):
    """How many workers the operator wants, ready or not, and what keeps them from it."""

    generation: Total
    """Of the operator's changes: the higher is the newer."""
    prefill: Count
    decode: Count
    edition: Total = 0
    """Of what is told in one generation: the higher is the newer."""
    prefill_revision: Name = ""
    """Of the config by which prefill workers are wanted."""
    decode_revision: Name = ""
    trouble: Annotated[tuple[Line, ...], msgspec.Meta(max_length=MAX_TROUBLES)] = ()
    """Who does not serve and why, a line each, the newest first."""


class Heartbeat(Message, frozen=True):
    """A worker is ready to serve at ``address``. Sent each second."""

    worker_id: BoundedWorkerId
    role: Role
    incarnation: BoundedIncarnation
    address: Name
    model: Name
    max_model_len: Count
    load: WorkerLoad
    state: Literal["ready", "draining"] = "ready"
    metrics_address: Name = ""
    cache_epoch: Name = ""
    """Of the newest reset that the worker knows of."""
    compat_hash: Name = ""
    """KV crosses between workers of one such hash only."""
    revision: Name = ""
    """Of the worker's config; workers of one role have the same but for the time of an update."""
    desired: DesiredWorkers | None = None
    """As the controller has told it; None: not yet."""
    controller_silence_s: Seconds | None = None
    """How long ago the controller last told it anything; None: never."""
