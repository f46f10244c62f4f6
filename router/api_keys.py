"""API keys: who may use the API, and see what there is behind it."""

import hashlib
import hmac
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from core.errors import ConfigError
from router.endpoints import OPEN_PATHS
from router.responses import ErrorBody, Problem, to_json

log = logging.getLogger(__name__)

LOOK_INTERVAL_S = 1.0
"""Between two looks at whether the file has changed."""
MAX_FILE_NBYTES = 2**20
MIN_KEY_LENGTH = 16

_Version = tuple[int, int, int]


class ApiKeys:
    """The keys in one file, as it is now. Only their digests are kept."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        """Read ``path``.

        Raises:
            ConfigError: it cannot be read, has no key, or one that no header can carry.
        """
        self._path = path
        self._clock = clock
        self._version = _version_of(path)
        self._digests = _read(path)
        self._next_look = clock() + LOOK_INTERVAL_S
        log.info("event=api_keys_read count=%d", len(self._digests))

    def admits(self, key: str) -> bool:
        """Whether ``key`` is one of them. How long this takes tells nothing about the keys."""
        self._look()
        digest = _digest(key)
        # All are compared, so that time does not tell which one matched.
        return sum([hmac.compare_digest(digest, each) for each in self._digests]) > 0

    def _look(self) -> None:
        """Take over what the file has become; what cannot be used leaves the keys as they are."""
        now = self._clock()
        if now < self._next_look:
            return
        self._next_look = now + LOOK_INTERVAL_S
        version = _version_of(self._path)
        if version == self._version:
            return
        self._version = version
        try:
            self._digests = _read(self._path)
        except ConfigError as error:
            log.error("event=api_keys_kept reason=%s", error)  # noqa: TRY400 - one line is enough
        else:
            log.info("event=api_keys_read count=%d", len(self._digests))


class KeyedApp:
    """ASGI middleware: without a key no request reaches anything but what is open."""

    def __init__(self, app: ASGIApp, *, keys: ApiKeys) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer 401."""
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        key = _bearer(scope)
        if key is not None and self._keys.admits(key):
            await self._app(scope, receive, send)
            return
        given = "the API key is not valid" if key else "this API needs a key"
        message = f"{given}; send one as 'Authorization: Bearer KEY'"
        body = to_json(ErrorBody(Problem(message, "authentication_error", None, "invalid_api_key")))
        headers = {"www-authenticate": "Bearer"}
        answer = Response(body, 401, headers, media_type="application/json")
        await answer(scope, receive, send)


def _bearer(scope: Scope) -> str | None:
    """Return the key that a request carries; None: none, or more than one."""
    values = [value for name, value in scope["headers"] if name == b"authorization"]
    if len(values) != 1:
        return None
    scheme, _, key = values[0].decode("latin-1").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else None


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _version_of(path: Path) -> _Version | None:
    """Return what changes with the file, also where a mounted secret swaps a link; None: gone."""
    try:
        found = os.stat(path)  # noqa: PTH116 - follows links, like the reading does
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


def _read(path: Path) -> tuple[bytes, ...]:
    return tuple(_digest(key) for key in read_keys(path))


def read_keys(path: Path) -> tuple[str, ...]:
    """Return the keys in ``path``, in their order.

    Raises:
        ConfigError: it cannot be read, has no key, or one that no header can carry.
    """
    field = f"security.api_keys_file: {path}"
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE_NBYTES + 1)
        text = content.decode("ascii")
    except OSError as error:
        raise ConfigError(
            f"{field}: {error.strerror}; give a file this process can read"
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{field}: not ASCII text; give one key per line") from error
    if len(content) > MAX_FILE_NBYTES:
        raise ConfigError(f"{field}: more than {MAX_FILE_NBYTES} bytes; give one key per line")
    lines = ((at, line.strip()) for at, line in enumerate(text.splitlines(), start=1))
    keys = [(at, line) for at, line in lines if line and not line.startswith("#")]
    for at, key in keys:
        if len(key) < MIN_KEY_LENGTH or not key.isprintable() or " " in key:
            raise ConfigError(
                f"{field}: line {at} is no key: at least {MIN_KEY_LENGTH} printable characters "
                "without a space, such as `openssl rand -hex 32` prints"
            )
    if not keys:
        raise ConfigError(f"{field}: has no key; give one key per line")
    return tuple(key for _, key in keys)
