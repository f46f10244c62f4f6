"""Between router and workers: what the operator asks of the prefix caches."""

from typing import Literal

import msgspec

from core.ids import Incarnation, WorkerId
from core.messages.base import Message, Role
from core.tiers import Tier


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
