"""What came to the API's port and is no HTTP: what it was, and a log that it does not flood.

Most of it is a wrong ``https://`` in a client's settings, which its own error does not tell: it
gets no TLS back and says so in words of its library.
"""

import logging
import math
from typing import Final

import httptools

log = logging.getLogger(__name__)

LOG_INTERVAL_S: Final = 10.0
MAX_ADDRESSES: Final = 1024
"""Remembered, those that were told last."""
FOR_A_PROXY: Final = "it is meant for a proxy, which this is not"
_BEGINNINGS: Final = {
    b"\x16": "it is TLS: speak http, or put TLS in front",
    b"PRI * HTTP/2": "it is HTTP/2: speak HTTP/1.1, or put a proxy in front",
    b"CONNECT ": FOR_A_PROXY,
}
BEGINNING_NBYTES: Final = max(map(len, _BEGINNINGS))
"""How much of what a connection has sent is looked at."""


def what_it_is(first: bytes, parse_error: Exception) -> str:
    """Return what a connection that began with ``first`` speaks, and what to do about it.

    ``first`` need be no longer than ``BEGINNING_NBYTES``, and is empty where the connection spoke
    HTTP before.
    """
    for start, told in _BEGINNINGS.items():
        if first.startswith(start):
            return told
    if isinstance(parse_error, httptools.HttpParserCallbackError):  # says nothing of its cause
        return "the target of the request cannot be read"
    return str(parse_error)


class Strangers:
    """Tells of each address once per ``LOG_INTERVAL_S``; remembers ``MAX_ADDRESSES`` of them."""

    def __init__(self) -> None:
        # When an address was told last, and how many came from it since; in the order of telling.
        self._told: dict[str, tuple[float, int]] = {}

    def tell(self, client: tuple[str, int] | None, reason: str, *, now: float) -> None:
        """``client`` (None: the system does not know it) was refused at ``now`` for ``reason``."""
        host, port = client or ("unknown", 0)
        told_at, num_untold = self._told.get(host, (-math.inf, 0))
        if now - told_at < LOG_INTERVAL_S:
            self._told[host] = (told_at, num_untold + 1)
            return
        self._told.pop(host, None)
        self._told[host] = (now, 0)
        if len(self._told) > MAX_ADDRESSES:
            del self._told[next(iter(self._told))]
        shown = f"[{host}]" if ":" in host else host
        count = num_untold + 1
        log.warning("event=not_http peer=%s:%d new=%d reason=%s", shown, port, count, reason)
