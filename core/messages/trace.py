"""Between router and workers: what the operator asks of one request's way."""

from core.ids import Incarnation, RequestId, WorkerId
from core.messages.base import Message, Role
from core.trace import TraceEvent


class ShowTrace(Message, frozen=True):
    """Tell what is recorded of a request. Answered by ``TraceReport``, at once."""

    number: int
    """Of the question; the answer repeats it."""
    request_id: RequestId


class TraceReport(Message, frozen=True):
    """Answer to ``ShowTrace``."""

    number: int
    worker_id: WorkerId
    role: Role
    incarnation: Incarnation
    now_s: float
    """When this was sent, by the clock that the entries are recorded by."""
    events: tuple[TraceEvent, ...]
    """None: the worker never saw the request, or has forgotten it."""
