"""Identifier types: distinct, so that a swapped argument is a type error and not a bug."""

import secrets
from typing import NewType, TypeAlias

RequestId = NewType("RequestId", str)
WorkerId = NewType("WorkerId", str)
Attempt = NewType("Attempt", int)
"""Retry counter of one request, from 1. A stale attempt's messages are counted and dropped."""
Owner: TypeAlias = tuple[RequestId, Attempt]
"""Whose blocks and reads: one attempt of one request. Another attempt is another owner."""
Incarnation = NewType("Incarnation", str)
"""Random id of one worker process: two lives of one worker never share it."""
BlockId = NewType("BlockId", int)
Generation = NewType("Generation", int)
"""How often a block has been allocated; names one life of the block."""
StepSeq = NewType("StepSeq", int)
"""1 is a worker's first non-empty model step; 0 means "no step yet"."""
ReadId = NewType("ReadId", int)
OperationId = NewType("OperationId", int)
"""One NIC or copy operation on a worker's pool; never used again by that worker."""
Slot = NewType("Slot", int)
"""Row of the engine's per-sequence state (last sampled token, sampler state)."""


def new_incarnation() -> Incarnation:
    """Return a fresh random incarnation, 16 hex digits."""
    return Incarnation(secrets.token_hex(8))
