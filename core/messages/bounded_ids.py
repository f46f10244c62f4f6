"""Identifiers as messages carry them: of bounded length and range."""

from typing import Annotated

from msgspec import Meta

from core.bounds import MAX_COUNT, MAX_REQUESTS
from core.ids import Attempt, BlockId, Generation, Incarnation, RequestId, WorkerId

BoundedRequestId = Annotated[RequestId, Meta(max_length=256)]
BoundedWorkerId = Annotated[WorkerId, Meta(max_length=256)]
BoundedIncarnation = Annotated[Incarnation, Meta(max_length=64)]
BoundedAttempt = Annotated[Attempt, Meta(ge=1, le=MAX_COUNT)]
BoundedBlockId = Annotated[BlockId, Meta(ge=0, le=MAX_COUNT)]
BoundedGeneration = Annotated[Generation, Meta(ge=0, le=2**62)]
Owners = Annotated[
    tuple[tuple[BoundedRequestId, BoundedAttempt], ...], Meta(max_length=MAX_REQUESTS)
]
