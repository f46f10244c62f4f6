"""One connection of a client: what it may cost before the router knows what it asks for.

The server's own protocol takes a head of any length, waits for it for ever, and, where a client has
sent its next request already, does not tell the running one that the client has left. Told to end,
it drops the requests that it reads from then on. Of what is no HTTP it does not say who sent it.
Where a client would rather speak another protocol, it drops its body, and what follows.
"""

import asyncio
from typing import Any, Final

import httptools
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from router.http10 import UnchunkedApp
from router.responses import ErrorBody, Problem, to_json
from router.strangers import BEGINNING_NBYTES, FOR_A_PROXY, Strangers, what_it_is

HEAD_TIMEOUT_S: Final = 30.0
"""From a connection, or from the first byte of a later request, to the end of its headers."""
MAX_HEAD_NBYTES: Final = 2**16
"""Of a head that comes in several pieces: each piece is bounded by what is read at once."""
KEEP_ALIVE_S: Final = 75
"""How long a connection may do nothing between two requests. Longer than load balancers keep one,
or a request would meet the end of its connection."""

_REASONS: Final = {
    400: "Bad Request",
    408: "Request Timeout",
    431: "Request Header Fields Too Large",
}


class BoundedConnection(HttpToolsProtocol):
    """Use as uvicorn's ``http``. Bounds the head in bytes and time; an end reaches what runs.

    A request whose head was read is answered, unless the answer before it has ended the connection.
    """

    _head_nbytes: int | None = 0
    """Received of the head that is not complete; None: a body or nothing is expected."""
    _head_timer: asyncio.TimerHandle | None = None
    _cycles: tuple[RequestResponseCycle, ...] = ()
    """Of requests that are not answered yet, the one that runs first."""
    _beginning: bytes = b""
    """Of what the connection has sent, as far as ``what_it_is`` looks at it."""
    _is_leaving: bool = False
    """Whether the connection ends when nothing is unanswered any more."""

    def __init__(self, strangers: Strangers, **given: Any) -> None:  # noqa: ANN401 - as inherited
        """Tell ``strangers`` of what is no HTTP."""
        super().__init__(**given)
        self._strangers = strangers

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """See ``asyncio.Protocol``."""
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """See ``asyncio.Protocol``; what runs is told, though a later request waits behind it."""
        self._stop_timer()
        super().connection_lost(exc)
        for cycle in self._unanswered():
            cycle.disconnected = True
            cycle.message_event.set()

    def data_received(self, data: bytes) -> None:
        """See ``asyncio.Protocol``."""
        self._beginning += data[: BEGINNING_NBYTES - len(self._beginning)]
        self._unset_keepalive_if_required()
        try:
            self._parse(data)
        except httptools.HttpParserError as error:
            reason = what_it_is(b"" if self._cycles else self._beginning, error)
            self._strangers.tell(self.client, reason, now=self.loop.time())
            self._refuse(400, f"this is no HTTP/1.1 request: {reason}")
            return
        if self._head_nbytes is None or self.transport.is_closing():
            return
        self._head_nbytes += len(data)
        if self._head_nbytes > MAX_HEAD_NBYTES:
            self._refuse(431, f"the headers are longer than {MAX_HEAD_NBYTES} bytes; send fewer")

    def _parse(self, data: bytes) -> None:
        """Feed the parser; a wish to upgrade is passed over, as RFC 9110, 7.8 allows.

        The parser takes a request that has one to have no body and to be the last before another
        protocol. So it is parsed without: by another parser, as this one may take the connection
        to be over.
        """
        rest = memoryview(data)
        while rest:
            try:
                self.parser.feed_data(rest)
            except httptools.HttpParserUpgrade as wish:
                head = self._head_without_wish()
                self.parser = httptools.HttpRequestParser(self)
                # As the server's own: a client may have sent more behind its last request.
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
                self.parser.feed_data(head)
                rest = rest[wish.args[0] :]
            else:
                return

    def _head_without_wish(self) -> bytes:
        """Return the head that was read last, without its wish to upgrade.

        Raises:
            HttpParserError: it asks for a tunnel, which is another thing.
        """
        method, version = self.parser.get_method(), self.parser.get_http_version()
        if method == b"CONNECT":
            raise httptools.HttpParserInvalidMethodError(FOR_A_PROXY)
        lines = [b"%b %b HTTP/%b" % (method, self.url, version.encode())]
        lines += [b"%b: %b" % header for header in self.headers if header[0] != b"upgrade"]
        return b"\r\n".join([*lines, b"", b""])

    def on_message_begin(self) -> None:
        """See ``httptools``."""
        super().on_message_begin()
        self._head_nbytes = 0
        self._await_head()

    def on_header(self, name: bytes, value: bytes) -> None:
        """See ``httptools``; what follows a body is no header of the request."""
        if self._head_nbytes is not None:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """See ``httptools``."""
        if self.parser.should_upgrade():
            return  # comes again, without
        self._head_nbytes = None
        self._stop_timer()
        if self.parser.get_http_version() == "1.0":
            self.expect_100_continue = False  # knows no such answer: RFC 9110, 10.1.1
        super().on_headers_complete()
        self._cycles = (*self._unanswered(), self.cycle)

    def on_message_complete(self) -> None:
        """See ``httptools``."""
        if not self.parser.should_upgrade():
            super().on_message_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGIApp) -> None:  # type: ignore[override]
        """Run ``app`` for one request."""
        if cycle.scope["http_version"] == "1.0":
            app = UnchunkedApp(app, cycle)
        super()._start_asgi_task(cycle, app)  # pyright: ignore[reportArgumentType]

    def on_response_complete(self) -> None:
        """See ``RequestResponseCycle``; the next request runs, if one waits."""
        if self._is_leaving and not self._unanswered():
            self.transport.close()
        super().on_response_complete()

    def leave(self, *, now: bool) -> None:
        """End with the last answer to what was asked; at once, if ``now`` and it is only kept.

        Otherwise an idle connection ends with the answer to what it asks next.
        """
        self._is_leaving = True
        if now and self._is_only_kept():
            self.transport.close()

    def shutdown(self) -> None:
        """See ``uvicorn.Server``: end with the last answer, or at once."""
        self._is_leaving = True
        if not self._unanswered():
            self.transport.close()

    def _is_only_kept(self) -> bool:
        """Whether it has asked, all is answered, and nothing is on its way as far as is seen."""
        is_between = self._head_nbytes is None and not self._unanswered()
        return bool(self._cycles) and is_between and not self.cycle.more_body

    def _unanswered(self) -> tuple[RequestResponseCycle, ...]:
        return tuple(cycle for cycle in self._cycles if not cycle.response_complete)

    def _await_head(self) -> None:
        self._stop_timer()
        self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self._head_is_late)

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_is_late(self) -> None:
        if self._unanswered():
            self._await_head()  # the answer to the request before it goes on
        elif self._head_nbytes:
            self._refuse(408, f"the headers did not arrive within {HEAD_TIMEOUT_S:g} s")
        else:
            self.transport.close()  # nothing was asked

    def _refuse(self, status: int, message: str) -> None:
        self._stop_timer()
        body = to_json(ErrorBody(Problem(message, "invalid_request_error", None, None)))
        head = (
            f"HTTP/1.1 {status} {_REASONS[status]}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()
