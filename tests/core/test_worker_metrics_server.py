"""What a probe and Prometheus see of a worker, and what neither may do to it."""

import contextlib
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest
from prometheus_client import CollectorRegistry, Counter

from core.errors import ConfigError
from core.metrics import MetricsServer


class Checks:
    reason: str | None = None

    def why(self) -> str | None:
        return self.reason


@pytest.fixture
def checks() -> Checks:
    return Checks()


@pytest.fixture
def server(checks: Checks) -> Iterator[MetricsServer]:
    registry = CollectorRegistry()
    Counter("things", "Some", registry=registry).inc(3)
    server = MetricsServer(registry, host="127.0.0.1", checks={"/livez": checks.why})
    yield server
    server.close()


def get(server: MetricsServer, path: str) -> tuple[int, str]:
    url = server.address.removesuffix("/metrics") + path
    try:
        with urllib.request.urlopen(url, timeout=60) as answer:  # noqa: S310 - ours
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def exchanged(server: MetricsServer, method: str, path: str) -> tuple[int, dict[str, str], bytes]:
    """Return status, header fields but for the date, and all bytes that follow the head."""
    port = urlsplit(server.address).port
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        connection.sendall(f"{method} {path} HTTP/1.0\r\n\r\n".encode())
        content = b"".join(iter(lambda: connection.recv(65536), b""))
    head, _, body = content.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    fields = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
    del fields["date"]
    return int(first.split()[1]), fields, body


def test_metrics_and_checks_have_one_port(server: MetricsServer, checks: Checks) -> None:
    assert "things_total 3.0" in get(server, "/metrics")[1]
    assert get(server, "/livez") == (200, "ok\n")
    checks.reason = "no progress for 61 s"
    assert get(server, "/livez") == (503, "no progress for 61 s\n")


@pytest.mark.parametrize("path", ["/metrics", "/livez"])
@pytest.mark.parametrize("reason", [None, "no progress for 61 s"])
def test_head_has_what_get_would_have_without_its_body(
    server: MetricsServer, checks: Checks, path: str, reason: str | None
) -> None:
    checks.reason = reason
    (got, got_fields, body), (head, head_fields, nothing) = (
        exchanged(server, method, path) for method in ("GET", "HEAD")
    )
    assert (head, nothing) == (got, b"")
    assert head_fields == got_fields
    assert int(head_fields["content-length"]) == len(body)


def test_a_client_that_says_nothing_holds_up_nobody(server: MetricsServer) -> None:
    port = urlsplit(server.address).port
    with contextlib.ExitStack() as stack:
        for _ in range(8):
            stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=60))
        assert get(server, "/livez")[0] == 200


def test_a_taken_port_is_one_clear_error(server: MetricsServer) -> None:
    port = urlsplit(server.address).port
    assert port is not None
    with pytest.raises(ConfigError, match=rf"metrics\.port: cannot listen on 127\.0\.0\.1:{port}"):
        MetricsServer(CollectorRegistry(), host="127.0.0.1", port=port)
