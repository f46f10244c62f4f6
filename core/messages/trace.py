"""Between router and workers: what the operator asks of one request's way."""

from typing import Annotated

from msgspec import Meta

from core.bounds import Total
from core.messages.base import Message, Role
from core.messages.bounded_ids import BoundedIncarnation, BoundedRequestId, BoundedWorkerId
from core.trace import ClockTime, TraceEvent


class ShowTrace(Message, frozen=True):
    """Tell what is recorded of a request. Answered by ``TraceReport``, at once."""

    number: Total
    """Of the question; the answer repeats it."""
    request_id: BoundedRequestId


class TraceReport(Message, frozen=True):
    """Answer to ``ShowTrace``."""

    number: Total
    worker_id: BoundedWorkerId
    role: Role
    incarnation: BoundedIncarnation
    now_s: ClockTime
    """When this was sent, by the clock that the entries are recorded by."""
    events: Annotated[tuple[TraceEvent, ...], Meta(max_length=4096)]
    """None: the worker never saw the request, or has forgotten it."""
