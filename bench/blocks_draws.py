"""What chance decides about the requests of the storm: drawn in batches, the same for a seed."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

DRAWN_AT_ONCE = 10_000
NUM_PREFIXES = 48
PREFIX_TOKENS = 1_024


@dataclass(frozen=True, slots=True)
class StormPlan:
    """The load. Shares are of all requests."""

    num_requests: int
    num_blocks: int = 1_024
    max_running: int = 48
    min_tokens: int = 64
    max_tokens: int = 2_048
    max_outputs: int = 8
    aborted: float = 0.05
    sharing: float = 0.6
    received: float = 0.4
    copied: float = 0.1
    max_operation_steps: int = 6
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Draw:
    """What chance decided about one request."""

    serial: int
    num_tokens: int
    num_outputs: int
    num_shared: int
    prefix: int
    is_received: bool
    is_copied: bool
    operation_steps: int
    abort_after: int | None
    """Steps after the one that follows its admission; None: never."""


def draws(plan: StormPlan) -> Iterator[Draw]:
    """Return what chance decides, most requests short and a few long."""
    rng = np.random.default_rng(plan.seed)
    octaves = np.log2(plan.max_tokens / plan.min_tokens)
    for first in range(0, plan.num_requests, DRAWN_AT_ONCE):
        size = min(DRAWN_AT_ONCE, plan.num_requests - first)
        lengths = (plan.min_tokens * 2 ** (octaves * rng.random(size) ** 4)).astype(np.int64)
        outputs = rng.integers(1, plan.max_outputs, size, endpoint=True)
        sharing = rng.random(size) < plan.sharing
        shared = np.minimum(lengths - outputs - 1, PREFIX_TOKENS) * rng.random(size) * sharing
        received = rng.random(size) < plan.received
        operation = rng.integers(1, plan.max_operation_steps, size, endpoint=True)
        life = outputs + operation * received
        aborted = np.where(rng.random(size) < plan.aborted, life * rng.random(size), -1.0)
        columns = (
            range(first, first + size),
            lengths.tolist(),
            outputs.tolist(),
            shared.astype(np.int64).tolist(),
            np.minimum(rng.zipf(1.3, size), NUM_PREFIXES).tolist(),
            received.tolist(),
            (rng.random(size) < plan.copied).tolist(),
            operation.tolist(),
            (None if after < 0 else int(after) for after in aborted.tolist()),
        )
        for row in zip(*columns, strict=True):
            yield Draw(*row)
