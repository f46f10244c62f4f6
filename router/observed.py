"""Counts and times every HTTP request, and gives each an id."""

import re
import secrets
import time
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from router.endpoints import label_of
from router.metrics import RouterMetrics

_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")


class ObservedApp:
    """ASGI middleware. The inner app may set ``state.outcome`` where the status line lies.

    A response that began with 200 and failed counts as what it became; a client that left counts
    as 499. A client's own ``x-request-id`` is given back to it, and names its trace.
    """

    def __init__(self, app: ASGIApp, *, metrics: RouterMetrics, model: str) -> None:
        self._app = app
        self._metrics = metrics
        self._model = model

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on and observe it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        state: dict[str, Any] = scope.setdefault("state", {})
        request_id = _request_id(scope)
        state["request_id"] = request_id.decode()
        status = 500

        async def observing_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id)]
            await send(message)

        start_s = time.monotonic()
        try:
            await self._app(scope, receive, observing_send)
        finally:
            endpoint = label_of(scope["path"])
            code = str(state.get("outcome", status))
            self._metrics.requests.labels(model=self._model, endpoint=endpoint, code=code).inc()
            self._metrics.request_duration.labels(model=self._model, endpoint=endpoint).observe(
                time.monotonic() - start_s
            )


def request_id_of(scope: Scope) -> str:
    """Return the ``x-request-id`` that the response to a request carries."""
    return scope["state"]["request_id"]


def _request_id(scope: Scope) -> bytes:
    for name, value in scope["headers"]:
        if name == b"x-request-id" and _REQUEST_ID.fullmatch(value):
            return value
    return secrets.token_hex(16).encode()
