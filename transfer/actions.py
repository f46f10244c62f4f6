"""What the reader wants done. The worker carries actions out in order."""

from dataclasses import dataclass
from typing import TypeAlias

from core.ids import Incarnation, OperationId, Owner
from core.messages import (
    FirstToken,
    GroupBlocks,
    PieceId,
    Reading,
    Released,
    Renew,
    Ticket,
    Withdraw,
)


@dataclass(frozen=True, slots=True)
class Allocate:
    """Find local blocks for the ticket's; answer with ``Reader.allocated``, now or later.

    Asked once. Where there is no memory now, ``Reader.unallocated`` still lists the ticket.
    """

    owner: Owner
    ticket: Ticket


@dataclass(frozen=True, slots=True)
class PostRead:
    """Carry out one read; answer with ``Reader.landed`` or ``Reader.read_failed``, exactly once.

    ``target`` has room for the tokens that ``source`` offers; ``piece`` says in which layers.
    """

    operation: OperationId
    peer: Incarnation
    owner: Owner
    piece: PieceId
    source: tuple[GroupBlocks, ...]
    """Blocks in the peer's pool."""
    target: tuple[GroupBlocks, ...]
    """Blocks in the local pool."""
    first_token: int
    """Positions before it are not written: the reader has them."""
    end_token: int
    """The position behind the last that the source has computed: none from there on is written."""


@dataclass(frozen=True, slots=True)
class CancelRead:
    """Nobody waits for a read any more: post nothing more of it.

    It ends as ever, or by ``Reader.read_cancelled`` where some of it was not posted yet.
    """

    operation: OperationId


@dataclass(frozen=True, slots=True)
class WarmUp:
    """Read something that nobody wants; answer as for ``PostRead``. It fills no block."""

    operation: OperationId
    peer: Incarnation


@dataclass(frozen=True, slots=True)
class OperationTerminal:
    """Nothing of the operation will write any more. Emitted once for each ``allocated``."""

    operation: OperationId


@dataclass(frozen=True, slots=True)
class ReceiveStats:
    """How one request's KV came."""

    kv_nbytes: int
    num_tickets: int
    num_cached_tokens: int
    """In prefill's prefix cache."""
    prefill_s: float
    transfer_s: float
    """From the first post to the last landing; overlaps with prefill."""


@dataclass(frozen=True, slots=True)
class Deliver:
    """Every byte has landed under a good lease: the request can decode."""

    owner: Owner
    first_token: FirstToken
    blocks: tuple[GroupBlocks, ...]
    """Local blocks that were filled, with the generations that they had when the read began."""
    stats: ReceiveStats


@dataclass(frozen=True, slots=True)
class Fail:
    """The request's KV will not arrive from this source. Its reads may still be in progress."""

    owner: Owner
    peer: Incarnation
    reason: str
    is_retryable: bool


@dataclass(frozen=True, slots=True)
class Send:
    """Send a message to the source."""

    peer: Incarnation
    message: Renew | Reading | Released | Withdraw


@dataclass(frozen=True, slots=True)
class TearDown:
    """Tear the peer's endpoint down; each of its reads then ends by ``Reader.read_failed``."""

    peer: Incarnation
    reason: str


Action: TypeAlias = (
    Allocate | PostRead | CancelRead | WarmUp | OperationTerminal | Deliver | Fail | Send | TearDown
)
