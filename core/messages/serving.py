"""Between router and workers: requests, their outputs, and heartbeats."""

from typing import Literal

import msgspec

from core.ids import Attempt, Incarnation, RequestId, WorkerId
from core.messages.base import Message, Role
from core.sampling import SamplingParams, TokenLogprobs

FinishReason = Literal["stop", "length"]


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
