"""Serving a process's Prometheus metrics."""

from prometheus_client import CollectorRegistry, start_http_server

from core.errors import ConfigError


class MetricsServer:
    """Answers ``GET /metrics`` of one registry from a thread of its own; idle costs nothing."""

    def __init__(self, registry: CollectorRegistry, *, host: str, port: int = 0) -> None:
        """Listen on ``host``; port 0 takes a free one.

        Raises:
            ConfigError: the port is taken.
        """
        try:
            self._server, self._thread = start_http_server(port, addr=host, registry=registry)
        except OSError as error:
            raise ConfigError(f"metrics: cannot listen on {host}:{port}: {error}") from error
        self.address = f"http://{host}:{self._server.server_port}/metrics"

    def close(self) -> None:
        """Stop answering and end the thread."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=5)
