"""A router that is gone, breaks off or is something else is told as what it is.

The failure guarded against: a demo or status that shows half an answer as a whole one.
"""

import socket
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest

from core.errors import ConfigError
from deploy.api_client import API_KEY_VARIABLE, ApiClient, FailedAnswerError, UnreachableError

EVENT = b'data: {"choices": []}\n\n'
ANSWERS = {
    "/whole": (200, EVENT + EVENT + b"data: [DONE]\n\n"),
    "/comment": (200, b": keep-alive\n\n" + EVENT + b"data: [DONE]\n\n"),
    "/broken-off": (200, EVENT),
    "/failed-midway": (200, EVENT + b'data: {"error": {"message": "the worker died"}}\n\n'),
    "/refused": (400, b'{"error": {"message": "max_tokens: 0; give 1 or more"}}'),
    "/locked": (401, b'{"error": {"message": "this API needs a key"}}'),
    "/html": (502, b"<html>Bad gateway</html>"),
    "/status": (200, b'{"pods": 3}'),
    "/ready": (503, b'{"status": "no decode worker is ready"}'),
}


class _Adversary(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        status, body = ANSWERS[self.path]
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.do_GET()

    def log_message(self, *_args: object) -> None:
        """Say nothing."""


@pytest.fixture
def client() -> Iterator[ApiClient]:
    """Speak to a server that answers each path in one wrong or right way."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _Adversary) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield ApiClient(f"http://127.0.0.1:{server.server_port}", timeout_s=60)
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(("path", "count"), [("/whole", 2), ("/comment", 1)])
def test_a_whole_stream_is_every_event_before_done(
    client: ApiClient, path: str, count: int
) -> None:
    assert list(client.stream(path, {})) == [{"choices": []}] * count


@pytest.mark.parametrize(
    ("path", "named"),
    [
        ("/broken-off", "before its end"),
        ("/failed-midway", "the worker died"),
        ("/refused", "max_tokens: 0; give 1 or more"),
        ("/locked", "needs a key; put it into SLUICE_API_KEY"),
        ("/html", "502, and no word of a Sluice router"),
    ],
)
def test_anything_but_a_whole_stream_is_an_error_that_says_why(
    client: ApiClient, path: str, named: str
) -> None:
    with pytest.raises(FailedAnswerError, match=named):
        list(client.stream(path, {}))


def test_something_else_than_a_router_is_recognised(client: ApiClient) -> None:
    with pytest.raises(FailedAnswerError, match="not a Sluice router"):
        client.workers()


def test_not_ready_and_not_there_are_both_not_ready(client: ApiClient) -> None:
    assert not client.is_ready()
    gone = ApiClient("http://127.0.0.1:9")
    assert not gone.is_ready()
    with pytest.raises(UnreachableError, match="nothing answers"):
        gone.workers()


MALFORMED = [
    "127.0.0.1:8000",
    "https://x",
    "http://",
    "http://x:port",
    "http://x:99999",
    "http://[::1",
    "http://a..b",
    "http://a b",
    f"http://{'a' * 64}",
    "",
]


@pytest.mark.parametrize("url", MALFORMED)
def test_a_malformed_url_is_a_config_error_that_says_how_to_write_it(url: str) -> None:
    with pytest.raises(ConfigError, match=r"^--url .*give http://HOST\[:PORT\]"):
        ApiClient(url)


@pytest.mark.parametrize("key", ["abc\n", "a\rb", "schlüssel"])
def test_what_can_be_no_key_is_a_config_error_that_does_not_show_it(
    key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(API_KEY_VARIABLE, key)
    with pytest.raises(ConfigError, match=r"^SLUICE_API_KEY: has a character") as caught:
        ApiClient("http://127.0.0.1:9")
    assert key.strip() not in str(caught.value)


def test_what_speaks_no_http_is_told_so_without_its_bytes() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def garble() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(b"\x15\x03\x01\x00\x02\x02\x28\r\n")

        thread = Thread(target=garble)
        thread.start()
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(UnreachableError, match=f"^what answers at {url} speaks no HTTP; --url"):
            ApiClient(url, timeout_s=30).workers()
        thread.join()
