"""How a router leaves without a client noticing: it says so, goes on for a while, then refuses.

    drain ─▶ ``/readyz`` is 503, every answer ends its connection
      └─ ``router.drain_delay_s`` ─▶ new requests are refused; the service is over when none is left
           └─ kept connections end with their last answer; after a delay, idle ones at once

Whoever spreads connections over several routers hears of the drain later than the router does, and
connections that are kept alive stay where they are. Both are served meanwhile.
"""

import asyncio
import logging
from collections.abc import Callable

import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from router.admission import Admission
from router.connections import BoundedConnection

log = logging.getLogger(__name__)


class ClosingApp:
    """ASGI middleware: while ``is_leaving``, whoever is answered has to connect anew."""

    def __init__(self, app: ASGIApp, *, is_leaving: Callable[[], bool]) -> None:
        self._app = app
        self._is_leaving = is_leaving

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on."""

        async def closing_send(message: Message) -> None:
            if message["type"] == "http.response.start" and self._is_leaving():
                message["headers"] = [*message.get("headers", ()), (b"connection", b"close")]
            await send(message)

        await self._app(scope, receive, closing_send)


async def leave_from(
    drain: asyncio.Event, admission: Admission, server: uvicorn.Server, *, delay_s: float
) -> None:
    """Announce the end at ``drain``; refuse new requests ``delay_s`` later."""
    await drain.wait()
    log.info("event=draining pending=%d delay_s=%g", admission.num_pending, delay_s)
    admission.announce_end()
    await asyncio.sleep(delay_s)
    admission.refuse()
    connections: list[object] = [*server.server_state.connections]
    for connection in connections:
        # Answers that began before the drain have promised to keep it. Without a delay nobody has
        # had the time to ask once more and be told otherwise.
        if isinstance(connection, BoundedConnection):
            connection.leave(now=delay_s > 0)
