"""Which workers serve a request, and what a failure leads to. Pure functions of their arguments.

Least-loaded: the decode worker with the fewest requests, the prefill worker with the fewest
queued tokens. Loads are the larger of what the worker last reported and what this router has
sent there and not seen done, so a burst between two heartbeats does not land on one worker.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from core.ids import WorkerId
from router.registry import Worker

POLICY = "least_loaded"

RouteReason = Literal["short", "long", "no_prefill", "incompatible", "avoided"]
FailureKind = Literal["request", "capacity", "transfer", "internal", "draining", "worker_lost"]


@dataclass(frozen=True, slots=True)
class Route:
    """Where one attempt runs."""

    decode: Worker
    prefill: Worker | None
    """None: prefill on ``decode``."""
    reason: RouteReason

    @property
    def path(self) -> Literal["disagg", "local"]:
        """How the prompt's KV gets to the decode worker."""
        return "local" if self.prefill is None else "disagg"

    def described(self) -> dict[str, str]:
        """Return who was chosen and why, for the request's trace."""
        prefill = {} if self.prefill is None else {"prefill": self.prefill.worker_id}
        return {"decode": self.decode.worker_id, **prefill, "reason": self.reason}


@dataclass(slots=True)
class OwnLoad:
    """What this router has in flight, by worker."""

    sequences: Mapping[WorkerId, int] = field(default_factory=dict[WorkerId, int])
    """On decode workers."""
    prefill_tokens: Mapping[WorkerId, int] = field(default_factory=dict[WorkerId, int])
    """Of requests without a first token yet, on prefill workers."""


def choose_route(
    num_tokens: int,
    *,
    decode: Sequence[Worker],
    prefill: Sequence[Worker],
    own: OwnLoad,
    local_prefill_max_tokens: int,
    block_size: int,
    avoid: Collection[WorkerId] = (),
) -> Route | None:
    """Return the least loaded pair for a request; None while there is no decode worker.

    KV crosses between workers of one compatibility hash only, so while a fleet is being updated a
    decode worker without such a peer prefills by itself.

    Args:
        num_tokens: prompt and earlier output, whose KV must be made.
        decode: usable workers.
        prefill: usable workers.
        own: what this router has in flight.
        local_prefill_max_tokens: so short a request is prefilled on its decode worker.
        block_size: tokens in one block.
        avoid: workers that just failed this request: taken only where there is no other decode
            worker, never for prefill.
    """
    if not decode:
        return None
    num_blocks = -(-num_tokens // block_size)
    chosen = min(decode, key=lambda worker: _decode_cost(worker, own, num_blocks, avoid))
    if num_tokens <= local_prefill_max_tokens:
        return Route(chosen, None, "short")
    if not prefill:
        return Route(chosen, None, "no_prefill")
    compatible = [w for w in prefill if w.heartbeat.compat_hash == chosen.heartbeat.compat_hash]
    if not compatible:
        return Route(chosen, None, "incompatible")
    candidates = [w for w in compatible if w.worker_id not in avoid and not w.suspect]
    if not candidates:
        return Route(chosen, None, "avoided")
    return Route(chosen, min(candidates, key=lambda worker: _prefill_cost(worker, own)), "long")


def _decode_cost(
    worker: Worker, own: OwnLoad, num_blocks: int, avoid: Collection[WorkerId]
) -> tuple[bool, bool, bool, int, int, WorkerId]:
    load = worker.heartbeat.load
    sequences = max(load.running + load.waiting, own.sequences.get(worker.worker_id, 0))
    is_full = load.total_blocks > 0 and load.free_blocks < num_blocks
    return (
        worker.worker_id in avoid,
        worker.suspect,
        is_full,
        sequences,
        -load.free_blocks,
        worker.worker_id,
    )


def _prefill_cost(worker: Worker, own: OwnLoad) -> tuple[int, int, WorkerId]:
    load = worker.heartbeat.load
    queued = max(load.queued_tokens, own.prefill_tokens.get(worker.worker_id, 0))
    return (queued, -load.free_blocks, worker.worker_id)


def may_retry(kind: FailureKind, *, attempt: int, max_attempts: int) -> bool:
    """Return whether attempt ``attempt`` (from 1), which failed by ``kind``, has a successor.

    A request that is itself at fault, or an internal error that it may have caused, would only
    take the next worker down too. A worker that drains refuses before it has done anything, and
    gets no more requests: that always has a successor, and the caller does not count it.
    """
    if kind == "draining":
        return True
    return kind in {"capacity", "transfer", "worker_lost"} and attempt < max_attempts


def retry_delay_s(kind: FailureKind, *, attempt: int) -> float:
    """Return how long to wait before the next attempt: a full worker needs time to drain."""
    return min(2.0, 0.1 * 2.0**attempt) if kind == "capacity" else 0.0
