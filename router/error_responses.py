"""Errors as OpenAI's clients expect them, for every status and every path."""

import asyncio
import logging

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from core.errors import RequestError, RequestTooLargeError
from router.failures import HTTPFailure, http_failure, public_message
from router.responses import ErrorBody, Problem, to_json

log = logging.getLogger(__name__)

LINGER_S = 2.0
"""How long a client that still sends a refused body is listened to, so that it reads the answer."""


def error_body(error: BaseException) -> tuple[HTTPFailure, ErrorBody]:
    """Return how ``error`` is told to the client."""
    failure = http_failure(error)
    field = error.field if isinstance(error, RequestError) else None
    return failure, ErrorBody(Problem(public_message(error), failure.type, field, failure.code))


async def answer_error(_request: Request, error: Exception) -> Response:
    """Return the response to a request that ended in ``error``."""
    failure, body = error_body(error)
    headers: dict[str, str] = {}
    if failure.retry_after_s is not None:
        headers["retry-after"] = str(failure.retry_after_s)
    kind = RefusedBodyResponse if isinstance(error, RequestTooLargeError) else Response
    return kind(to_json(body), failure.status, headers, media_type="application/json")


async def answer_unexpected(request: Request, error: Exception) -> Response:
    """Return the response to a request that met a bug; the log has the cause."""
    log.error(
        "event=unexpected_error path=%s error=%s",
        request.url.path,
        type(error).__name__,
        exc_info=error,
    )
    return await answer_error(request, error)


async def answer_http_error(request: Request, error: Exception) -> Response:
    """Return the response to an unknown path or a wrong method."""
    assert isinstance(error, HTTPException), "registered for this type"
    path, method = request.url.path, request.method
    headers = dict(error.headers or {})
    if headers.get("Allow") == "GET":
        headers["Allow"] = "GET, HEAD"  # two routes to Starlette, which names the first
    if error.status_code == 404:  # noqa: PLR2004
        message = f"{method} {path:.100} does not exist; see GET /openapi.json"
    elif error.status_code == 405:  # noqa: PLR2004
        allowed = headers.get("Allow", "another method")
        message = f"{method} is not allowed on {path:.100}; use {allowed}"
    else:
        message = str(error.detail)
    body = to_json(ErrorBody(Problem(message, "invalid_request_error", None, None)))
    return Response(body, error.status_code, headers, media_type="application/json")


class RefusedBodyResponse(Response):
    """An answer sent while the client still sends its body; then the connection ends.

    Closing at once would reset the connection, and many clients would never see the answer.
    """

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, drop what still comes for a while, and close."""
        del scope
        headers = [*self.raw_headers, (b"connection", b"close")]
        await send({"type": "http.response.start", "status": self.status_code, "headers": headers})
        await send({"type": "http.response.body", "body": self.body, "more_body": True})
        try:
            async with asyncio.timeout(LINGER_S):
                while (message := await receive())["type"] == "http.request":
                    if not message.get("more_body"):
                        break
        except TimeoutError:
            log.info("refused_body=still_sending")
        await send({"type": "http.response.body", "body": b""})
