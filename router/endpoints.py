"""Every path that the router serves: who may ask for it, and under what name it is counted."""

from dataclasses import dataclass
from typing import Final, Literal

OTHER: Final = "other"
"""Counts what no path is served for: a label's values are bounded, a client's paths are not."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One path, as FastAPI reads it."""

    method: Literal["GET", "POST"]
    path: str
    is_open: bool = False
    """Whether it needs no API key. What probes and Prometheus ask names no worker, no request."""

    @property
    def methods(self) -> tuple[str, ...]:
        """What is answered there: what can be got, by its head alone too (RFC 9110, 9.1)."""
        return ("GET", "HEAD") if self.method == "GET" else (self.method,)

    @property
    def label(self) -> str:
        """The path without what names one thing behind it."""
        return self.path.partition("/{")[0]


COMPLETIONS: Final = Endpoint("POST", "/v1/completions")
CHAT_COMPLETIONS: Final = Endpoint("POST", "/v1/chat/completions")
MODELS: Final = Endpoint("GET", "/v1/models")
MODEL: Final = Endpoint("GET", "/v1/models/{name:path}")
CACHE: Final = Endpoint("GET", "/v1/cache")
CACHE_RESET: Final = Endpoint("POST", "/v1/cache/reset")
TRACE: Final = Endpoint("GET", "/v1/trace/{name:path}")
STATUS: Final = Endpoint("GET", "/status")
HEALTH: Final = Endpoint("GET", "/health", is_open=True)
LIVEZ: Final = Endpoint("GET", "/livez", is_open=True)
READY: Final = Endpoint("GET", "/ready", is_open=True)
READYZ: Final = Endpoint("GET", "/readyz", is_open=True)
METRICS: Final = Endpoint("GET", "/metrics", is_open=True)

ENDPOINTS: Final = (
    COMPLETIONS,
    CHAT_COMPLETIONS,
    MODELS,
    MODEL,
    CACHE,
    CACHE_RESET,
    TRACE,
    STATUS,
    HEALTH,
    LIVEZ,
    READY,
    READYZ,
    METRICS,
)

OPEN_PATHS: Final = frozenset(each.path for each in ENDPOINTS if each.is_open)
_LABELS: Final = frozenset(each.label for each in ENDPOINTS)
_WITH_NAMES: Final = tuple(f"{each.label}/" for each in ENDPOINTS if each.label != each.path)


def label_of(path: str) -> str:
    """Return what a request for ``path`` is counted as."""
    if path in _LABELS:
        return path
    return next((start[:-1] for start in _WITH_NAMES if path.startswith(start)), OTHER)
