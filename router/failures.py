"""How a request's failures look in HTTP: status, OpenAI error type and code."""

from dataclasses import dataclass
from http import HTTPStatus

from core.errors import (
    CapacityError,
    ModelNotFoundError,
    OverloadedError,
    RequestError,
    RequestTooLargeError,
    SluiceError,
    TransferError,
)


class ContextLengthError(RequestError):
    """Prompt and output do not fit in the model's context."""


class TraceNotFoundError(RequestError):
    """Nothing is recorded of the request."""


class GenerationTimeoutError(SluiceError):
    """The request took longer than the router lets any request take."""


class ShuttingDownError(OverloadedError):
    """The router stops; another one may serve the request."""


class WorkersLostError(TransferError):
    """Every attempt lost its worker or its KV."""


@dataclass(frozen=True, slots=True)
class HTTPFailure:
    """One row of the table below."""

    status: int
    type: str
    code: str | None
    retry_after_s: int | None = None


_FAILURES: tuple[tuple[type[SluiceError], HTTPFailure], ...] = (
    (ModelNotFoundError, HTTPFailure(404, "invalid_request_error", "model_not_found")),
    (TraceNotFoundError, HTTPFailure(404, "invalid_request_error", "trace_not_found")),
    (RequestTooLargeError, HTTPFailure(413, "invalid_request_error", "request_too_large")),
    (ContextLengthError, HTTPFailure(400, "invalid_request_error", "context_length_exceeded")),
    (RequestError, HTTPFailure(400, "invalid_request_error", "invalid_value")),
    (ShuttingDownError, HTTPFailure(503, "service_unavailable", "shutting_down", 2)),
    (CapacityError, HTTPFailure(503, "service_unavailable", "overloaded", 1)),
    (TransferError, HTTPFailure(503, "service_unavailable", "workers_lost", 1)),
    (GenerationTimeoutError, HTTPFailure(504, "timeout", "request_timeout")),
)
_INTERNAL = HTTPFailure(HTTPStatus.INTERNAL_SERVER_ERROR, "internal_error", None)


def http_failure(error: BaseException) -> HTTPFailure:
    """Return how ``error`` is told to the client; anything not on purpose is an internal error."""
    for kind, failure in _FAILURES:
        if isinstance(error, kind):
            return failure
    return _INTERNAL


def public_message(error: BaseException) -> str:
    """Return what the client may read about ``error``."""
    if isinstance(error, SluiceError):
        return str(error)
    return "internal error; the router's log has the cause"
