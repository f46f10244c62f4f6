"""A process's Prometheus metrics and its health, by HTTP."""

import socket
import socketserver
from collections.abc import Callable, Iterable
from threading import Thread
from typing import Any, Final
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import (
    CollectorRegistry,
    make_wsgi_app,  # pyright: ignore[reportUnknownVariableType]
)

from core.errors import ConfigError

Check = Callable[[], str | None]
"""Returns why it fails, in one line; None: it does not."""

_PLAIN_TEXT: Final = ("Content-Type", "text/plain; charset=utf-8")
SOCKET_TIMEOUT_S = 10.0
"""Of a client that connects and says nothing."""


class MetricsServer:
    """Answers ``GET /metrics`` and the given checks from threads of its own; idle costs nothing.

    ``HEAD`` has what ``GET`` would have, without its body.
    """

    def __init__(
        self,
        registry: CollectorRegistry,
        *,
        host: str,
        port: int = 0,
        checks: dict[str, Check] | None = None,
    ) -> None:
        """Listen on ``host``.

        Args:
            registry: What ``/metrics`` shows.
            host: An address of this machine.
            port: 0 takes a free one.
            checks: By path, such as ``/livez``: 200, or 503 with the reason.

        Raises:
            ConfigError: the port is taken.
        """
        app = _App(make_wsgi_app(registry), checks or {})
        try:
            kind = _IPv6Server if ":" in host else _Server
            self._server = make_server(host, port, app, kind, _QuietHandler)
        except OSError as error:
            raise ConfigError(
                f"metrics.port: cannot listen on {host}:{port}: {error}; stop what uses it, or "
                "give another port, or 0 for a free one"
            ) from error
        self._thread = Thread(
            target=self._server.serve_forever, name="metrics", daemon=True, args=(0.1,)
        )
        self._thread.start()
        shown = f"[{host}]" if ":" in host else host
        self.address = f"http://{shown}:{self._server.server_port}/metrics"

    def close(self) -> None:
        """Stop answering and end the thread."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=5)


class _App:
    def __init__(self, metrics: Any, checks: dict[str, Check]) -> None:  # noqa: ANN401 - WSGI
        self._metrics = metrics
        self._checks = checks

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:  # noqa: ANN401
        if environ.get("REQUEST_METHOD") != "HEAD":
            return self._answer(environ, start_response)

        def start_empty(status: str, headers: list[tuple[str, str]]) -> None:
            head.append((status, headers))

        head: list[tuple[str, list[tuple[str, str]]]] = []
        nbytes = sum(map(len, self._answer({**environ, "REQUEST_METHOD": "GET"}, start_empty)))
        status, headers = head[0]
        start_response(status, [*headers, ("Content-Length", str(nbytes))])
        return []

    def _answer(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:  # noqa: ANN401
        check = self._checks.get(environ.get("PATH_INFO", ""))
        if check is None:
            return self._metrics(environ, start_response)
        reason = check()
        start_response("200 OK" if reason is None else "503 Service Unavailable", [_PLAIN_TEXT])
        return [f"{reason or 'ok'}\n".encode()]


class _Server(socketserver.ThreadingMixIn, WSGIServer):
    daemon_threads = True


class _IPv6Server(_Server):
    address_family = socket.AF_INET6


class _QuietHandler(WSGIRequestHandler):
    timeout = SOCKET_TIMEOUT_S

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002, ANN401 - as inherited
        """Say nothing of a scrape."""
