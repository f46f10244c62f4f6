"""Between decode and prefill: requests for KV, tickets, leases."""

from typing import Annotated

import msgspec
from msgspec import Meta

from core.bounds import (
    MAX_TOKENS,
    Chunk,
    Count,
    Digest,
    Explanation,
    Group,
    Layer,
    Name,
    Seconds,
    TokenId,
    TokenIds,
    Total,
)
from core.messages.base import Message
from core.messages.bounded_ids import (
    BoundedAttempt,
    BoundedBlockId,
    BoundedGeneration,
    BoundedIncarnation,
    BoundedRequestId,
    Owners,
)
from core.sampling import SamplingParams, TokenLogprobs


class Prefill(Message, frozen=True):
    """Compute this request's KV and offer it by tickets, from ``first_token`` on."""

    request_id: BoundedRequestId
    attempt: BoundedAttempt
    prompt_token_ids: TokenIds
    sampling: SamplingParams
    output_token_ids: TokenIds = ()
    first_token: Count = 0
    """A multiple of decode's block size: decode holds the KV before it."""
    cache_salt: Name = ""


class PieceId(msgspec.Struct, frozen=True, order=True):
    """One piece of a request's KV, on all ranks. The reader needs a *set* of these, not a count."""

    first_layer: Layer
    last_layer: Layer
    """Inclusive; in the group's own numbering."""
    chunk: Chunk


class GroupBlocks(msgspec.Struct, frozen=True):
    """Adjacent positions of one group's block table, and the source blocks that hold them."""

    group: Group
    first_index: Count
    """Of the first block in the request's table: absolute, counted from token 0."""
    block_ids: Annotated[tuple[BoundedBlockId, ...], Meta(max_length=MAX_TOKENS)]
    generations: Annotated[tuple[BoundedGeneration, ...], Meta(max_length=MAX_TOKENS)]
    digests: Annotated[tuple[Digest, ...], Meta(max_length=MAX_TOKENS)] = ()
    """Of the bytes of each block that this piece is about, where the source computes them."""


class FirstToken(msgspec.Struct, frozen=True):
    """The token that prefill sampled."""

    token_id: TokenId
    logprobs: TokenLogprobs | None = None


class Ticket(Message, frozen=True):
    """The named source blocks hold the request's KV and stay until the lease ends.

    Sent only after the step that wrote them, or as much of it as the piece names, is complete on
    the device.
    """

    request_id: BoundedRequestId
    attempt: BoundedAttempt
    incarnation: BoundedIncarnation
    piece: PieceId
    blocks: Annotated[tuple[GroupBlocks, ...], Meta(max_length=MAX_TOKENS)]
    num_tokens: Count
    """Prompt tokens covered by this and all earlier chunks."""
    lease_s: Seconds
    """From now; a renewal never shortens it."""
    last: bool = False
    """No chunk after this one."""
    first_token: FirstToken | None = None
    """With the last ticket."""
    num_cached_tokens: Count = 0
    """Of the prompt, in prefill's prefix cache."""
    prefill_s: Seconds = 0.0
    """From the request's arrival at prefill to this ticket."""


class Renew(Message, frozen=True):
    """The reader still wants these requests' tickets."""

    sequence: Total
    requests: Owners


class Renewed(Message, frozen=True):
    """Answer to ``Renew``: the leases that are good for ``lease_s`` more from its receipt."""

    sequence: Total
    incarnation: BoundedIncarnation
    requests: Owners
    void: Owners
    """Unknown, expired or withdrawn: their bytes must not be trusted."""
    lease_s: Seconds


class Reading(Message, frozen=True):
    """Reads against the source's pool are in progress: it must make progress for them."""

    active: bool
    """False: no read of this reader is outstanding any more."""


class Released(Message, frozen=True):
    """Every piece has landed; the source may free its blocks."""

    request_id: BoundedRequestId
    attempt: BoundedAttempt
    incarnation: BoundedIncarnation
    """Of the source that issued the tickets."""


class Withdraw(Message, frozen=True):
    """The reader will trust no byte of this request: the source frees at once.

    A read still in progress can harm only its reader, which keeps its blocks in quarantine.
    """

    request_id: BoundedRequestId
    attempt: BoundedAttempt


class PrefillFailed(Message, frozen=True):
    """The source will issue no (more) ticket for this attempt, and its old ones are void."""

    request_id: BoundedRequestId
    attempt: BoundedAttempt
    incarnation: BoundedIncarnation
    reason: Explanation
    retryable: bool = True
