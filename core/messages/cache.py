"""Between router and workers: what the operator asks of the prefix caches."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from core.bounds import Count, Name, Total
from core.messages.base import Message, Role
from core.messages.bounded_ids import BoundedIncarnation, BoundedWorkerId
from core.tiers import Tier

Epoch = Annotated[str, Meta(max_length=128, pattern=r"\A(?:[0-9]{12}-[0-9A-Za-z_]+)?\Z")]
"""Part of a path in storage: nothing but what ``core.cache_epoch`` makes."""


class ResetCache(Message, frozen=True):
    """Forget every prefix computed up to now. Answered by ``CacheReport``, done or not."""

    number: Total
    """Of the question; the answer repeats it."""
    epoch: Epoch = ""
    """What stored blocks are named after from now on, the same on every worker (see
    ``core.cache_epoch``); "": the worker names one, and shares nothing that it stores."""


class ShowCache(Message, frozen=True):
    """Tell the state of the cache. Answered by ``CacheReport``."""

    number: Total
    """Of the question; the answer repeats it."""


class TierUse(msgspec.Struct, frozen=True):
    """One tier of a worker's prefix cache."""

    tier: Tier
    blocks: Count
    """That a prefix can hit."""
    hit_tokens: Total
    """Since the worker's start."""


class CacheState(msgspec.Struct, frozen=True):
    """A worker's KV blocks and prefix cache. Counters run from the worker's start."""

    blocks: Annotated[dict[Name, Count], Meta(max_length=64)]
    """By state; the sum is the pool."""
    query_tokens: Total
    """Looked up in the cache, in full blocks."""
    hit_tokens: Total
    evictions: Total
    resets: Total
    reset: Literal["none", "pending", "done"]
    """Of the last reset: pending while a block that was in use then still is."""
    tiers: Annotated[tuple[TierUse, ...], Meta(max_length=16)]
    storage: Literal["none", "pending", "done", "failed"] = "none"
    """Whether the last reset is written to storage, so that later workers keep to it; none: there
    is no storage, or was no reset. failed: what was stored may come back."""


class CacheReport(Message, frozen=True):
    """Answer to ``ResetCache`` and ``ShowCache``."""

    number: Total
    worker_id: BoundedWorkerId
    role: Role
    incarnation: BoundedIncarnation
    state: CacheState
