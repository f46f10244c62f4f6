"""Answers to HTTP/1.0, which proxies such as nginx speak by default.

The server would send it chunks, which only HTTP/1.1 knows.
"""

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle


class UnchunkedApp:
    """ASGI middleware for one request: a body of no known length ends with its connection.

    The server ends each connection of HTTP/1.0 after one answer, and says so in its head.
    """

    def __init__(self, app: ASGIApp, cycle: RequestResponseCycle) -> None:
        self._app = app
        self._cycle = cycle
        self._has_length = True

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on."""

        async def plain_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                names = {name.lower() for name, _ in message.get("headers", ())}
                self._has_length = b"content-length" in names
            if not self._has_length:
                self._cycle.chunked_encoding = False
                # The server counts down to 0 what it was promised: each part is all of it.
                self._cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        await self._app(scope, receive, plain_send)
