"""Between decode and prefill: requests for KV, tickets, leases."""

import msgspec

from core.ids import Attempt, BlockId, Generation, Incarnation, RequestId
from core.messages.base import Message
from core.sampling import SamplingParams, TokenLogprobs


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
