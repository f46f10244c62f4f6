"""A small client of a running deployment's HTTP API: readiness, workers, streamed answers."""

import http.client
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import closing
from typing import Any, Literal, TypeVar
from urllib.parse import urlsplit

import msgspec

from core.config import RouterConfig
from core.errors import ConfigError, SluiceError
from core.ids import WorkerId
from core.messages import Role, TierUse, WorkerLoad

T = TypeVar("T")

WILDCARD_HOSTS = ("0.0.0.0", "::")  # noqa: S104 - compared with, not bound to
API_KEY_VARIABLE = "SLUICE_API_KEY"
"""Where the key is for a router with ``security.api_keys_file``."""


class UnreachableError(SluiceError):
    """Nothing answers at the address."""


class FailedAnswerError(SluiceError):
    """The API answered with an error, or broke off."""


WorkerState = Literal["starting", "ready", "draining", "lost"]


class WorkerStatus(msgspec.Struct, frozen=True):
    """One worker, as the router sees it."""

    worker_id: WorkerId
    role: Role
    state: WorkerState
    """starting: a decode worker that has not yet answered the router's first generation. lost: it
    reported until ``silent_s`` ago, and has not ended after a drain."""
    load: WorkerLoad
    metrics_address: str = ""
    suspect: bool = False
    """A request failed there since its last report: it is avoided for now."""
    silent_s: float = 0.0
    """Since its last report."""
    revision: str = ""
    """Of its config."""
    compat_hash: str = ""
    """KV crosses between workers of one such hash only."""
    incarnation: str = ""
    """Of this life of it."""


class RouterStatus(msgspec.Struct, frozen=True):
    """What a router says of itself and of the workers that report to it."""

    model: str
    workers: list[WorkerStatus]
    pending_requests: int = 0
    desired: dict[Role, int] | None = None
    """How many workers of each role are wanted; None: not known."""
    desired_revisions: dict[Role, str] | None = None
    """By which config; None: not known."""
    trouble: tuple[str, ...] = ()
    """Who of those wanted does not serve and why, the newest first."""
    controller_silence_s: float | None = None
    """How long ago the controller last spoke to any of them; None: never, or nobody knows."""


class CacheStatus(msgspec.Struct, frozen=True):
    """One worker's KV blocks and prefix cache."""

    worker_id: WorkerId
    role: Role
    status: Literal["ok", "unreachable"]
    """unreachable: it did not answer the router, and nothing more than ``silent_s`` is known."""
    silent_s: float | None = None
    """How long it had not reported to the router; None: not told."""
    blocks: dict[str, int] = {}
    """By state."""
    query_tokens: int = 0
    """Looked up since the worker's start."""
    evictions: int = 0
    reset: Literal["none", "pending", "done"] = "none"
    """Of the last reset."""
    tiers: tuple[TierUse, ...] = ()
    storage: Literal["none", "pending", "done", "failed"] = "none"
    """Whether storage has taken the last reset."""


class _Caches(msgspec.Struct, frozen=True):
    workers: list[CacheStatus]


ResetStatus = Literal["done", "pending", "storage_failed", "unreachable"]
"""storage_failed: a worker that starts later may find there what was to be forgotten."""


class WorkerReset(msgspec.Struct, frozen=True):
    """How far one worker's reset is."""

    worker_id: WorkerId
    role: Role
    status: ResetStatus
    silent_s: float | None = None
    """As of ``CacheStatus``."""


class CacheReset(msgspec.Struct, frozen=True):
    """What a reset has come to at all workers; ``status`` is the worst of theirs."""

    status: ResetStatus
    workers: list[WorkerReset]


class ApiClient:
    """Speaks to one router. Every call has a connection and a deadline of its own."""

    def __init__(self, url: str, *, timeout_s: float = 5.0, api_key: str | None = None) -> None:
        """Use the router at ``url``; ``timeout_s`` bounds each wait for bytes.

        Where no ``api_key`` is given, it is that in ``SLUICE_API_KEY``, if any.

        Raises:
            ConfigError: ``url`` is not ``http://host[:port]``, or the key is none.
        """
        self._host, self._port = _host_and_port(url)
        self.url = url
        self._timeout_s = timeout_s
        self._api_key = api_key or os.environ.get(API_KEY_VARIABLE)
        if self._api_key and not (self._api_key.isascii() and self._api_key.isprintable()):
            raise ConfigError(
                f"{API_KEY_VARIABLE}: has a character that is in no key, such as the end of a "
                "line; give the key alone"
            )

    def with_timeout(self, timeout_s: float) -> "ApiClient":
        """Return a client of the same router that waits for so long."""
        return ApiClient(self.url, timeout_s=timeout_s, api_key=self._api_key)

    def is_ready(self) -> bool:
        """Return whether a generation can pass now; False too where nothing listens yet."""
        try:
            return self._request("GET", "/ready")[0] == http.HTTPStatus.OK
        except UnreachableError:
            return False

    def json(self, path: str) -> Any:  # noqa: ANN401 - as json.loads
        """Return the JSON answer of a GET.

        Raises:
            UnreachableError: nothing answers.
            FailedAnswerError: the answer is an error or no JSON.
        """
        body = self._checked("GET", path)
        try:
            return json.loads(body)
        except ValueError as error:
            raise FailedAnswerError(f"{self.url}{path} answered no JSON") from error

    def get(self, path: str, kind: type[T]) -> T:
        """Return the answer of a GET as a ``kind``.

        Raises:
            UnreachableError: nothing answers.
            FailedAnswerError: the answer is an error, or not of a Sluice router.
        """
        return self._convert(self._checked("GET", path), kind)

    def workers(self) -> list[WorkerStatus]:
        """Return every worker that reports to the router.

        Raises:
            UnreachableError: nothing answers.
            FailedAnswerError: the answer is an error, or not of a Sluice router.
        """
        return self.status().workers

    def status(self) -> RouterStatus:
        """Return what the router says of itself and its workers.

        Raises:
            UnreachableError: nothing answers.
            FailedAnswerError: the answer is an error, or not of a Sluice router.
        """
        return self.get("/status", RouterStatus)

    def text(self, path: str) -> str:
        """Return the answer of a GET as text.

        Raises:
            UnreachableError: nothing answers.
            FailedAnswerError: the answer is an error.
        """
        return self._checked("GET", path).decode(errors="replace")

    def caches(self) -> list[CacheStatus]:
        """Return the state of every worker's prefix cache.

        Raises:
            UnreachableError: nothing answers.
            FailedAnswerError: the answer is an error, or not of a Sluice router.
        """
        return self.get("/v1/cache", _Caches).workers

    def reset_caches(self) -> CacheReset:
        """Have every worker forget its prefix cache, and return how far that is.

        Raises:
            UnreachableError: nothing answers.
            FailedAnswerError: the answer is an error, or not of a Sluice router.
        """
        return self._convert(self._checked("POST", "/v1/cache/reset"), CacheReset)

    def stream(self, path: str, body: Mapping[str, object]) -> Iterator[dict[str, Any]]:
        """POST ``body`` and yield each server-sent event until ``[DONE]``.

        Raises:
            UnreachableError: nothing answers.
            FailedAnswerError: the answer is an error, holds one, or ends before ``[DONE]``.
        """
        with closing(self._connection()) as connection:
            response = self._send(connection, "POST", path, json.dumps(body).encode())
            if response.status != http.HTTPStatus.OK:
                raise FailedAnswerError(_error_message(response.status, response.read()))
            yield from self._events(response)

    def _events(self, response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
        while line := self._read_line(response):
            if not line.startswith(b"data:"):
                continue
            payload = line.removeprefix(b"data:").strip()
            if payload == b"[DONE]":
                return
            event = json.loads(payload)
            if "error" in event:
                raise FailedAnswerError(_error_message(response.status, payload))
            yield event
        raise FailedAnswerError("the stream broke off before its end")

    def _read_line(self, response: http.client.HTTPResponse) -> bytes:
        try:
            return response.readline()
        except (OSError, http.client.HTTPException) as error:
            raise FailedAnswerError(f"the stream broke off: {error}") from error

    def _convert(self, body: bytes, kind: type[T]) -> T:
        try:
            return msgspec.json.decode(body, type=kind)
        except msgspec.DecodeError as error:
            raise FailedAnswerError(f"{self.url} is not a Sluice router: {error}") from error

    def _checked(self, method: str, path: str) -> bytes:
        status, body = self._request(method, path)
        if status not in {http.HTTPStatus.OK, http.HTTPStatus.ACCEPTED}:
            raise FailedAnswerError(f"{self.url}{path}: {_error_message(status, body)}")
        return body

    def _request(self, method: str, path: str) -> tuple[int, bytes]:
        with closing(self._connection()) as connection:
            response = self._send(connection, method, path, None)
            try:
                return response.status, response.read()
            except (OSError, http.client.HTTPException) as error:
                raise UnreachableError(f"{self.url} broke off: {error}") from error

    def _connection(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(self._host, self._port, timeout=self._timeout_s)

    def _send(
        self, connection: http.client.HTTPConnection, method: str, path: str, body: bytes | None
    ) -> http.client.HTTPResponse:
        headers = {"Content-Type": "application/json", "X-Sluice-Stats": "1"}
        if self._api_key:
            headers["Authorization"] = f"Bearer {self._api_key}"
        try:
            connection.request(method, path, body, headers)
            return connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            reason = f"nothing answers at {self.url} ({error})"
            if isinstance(error, http.client.BadStatusLine) and not isinstance(error, OSError):
                reason = f"what answers at {self.url} speaks no HTTP"
            raise UnreachableError(f"{reason}; --url names another") from error


def url_of_router(router: RouterConfig) -> str:
    """Return where a router of this machine answers that goes by ``router``."""
    host = "127.0.0.1" if router.host in WILDCARD_HOSTS else router.host
    return f"http://[{host}]:{router.port}" if ":" in host else f"http://{host}:{router.port}"


def _host_and_port(url: str) -> tuple[str, int]:
    """Return what ``url`` names.

    Raises:
        ConfigError: it is not ``http://host[:port]``, or the host's name cannot be one.
    """
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port or http.client.HTTP_PORT
        host.encode("idna")
        http.client.HTTPConnection(host, port)  # opens nothing, and knows what a name may have
    except (ValueError, http.client.InvalidURL) as error:
        raise ConfigError(f"--url {url!r}: {error}; give http://HOST[:PORT]") from error
    if parts.scheme != "http" or not host:
        without_tls = ": TLS is not spoken here" if parts.scheme == "https" else ""
        raise ConfigError(f"--url {url!r}: give http://HOST[:PORT]{without_tls}")
    return host, port


def _error_message(status: int, body: bytes) -> str:
    try:
        error = json.loads(body)["error"]
        hint = f"; put it into {API_KEY_VARIABLE}" if status == http.HTTPStatus.UNAUTHORIZED else ""
        return f"{status}: {error['message']}{hint}"
    except (ValueError, KeyError, TypeError):
        return f"HTTP status {status}, and no word of a Sluice router: is one behind this address?"
