"""Structured logging: key=value lines with the worker and, where there is one, the request."""

import logging
import sys
from contextvars import ContextVar

request_context: ContextVar[str] = ContextVar("request_context", default="")
"""``request=ID attempt=N`` while one request is being handled."""


class _ContextFilter(logging.Filter):
    def __init__(self, worker: str) -> None:
        super().__init__()
        self._worker = worker

    def filter(self, record: logging.LogRecord) -> bool:
        record.worker = self._worker
        context = request_context.get()
        record.request = f"{context} " if context else ""
        return True


def set_up_logging(level: str, *, worker: str) -> None:
    """Log to stderr as ``time level worker=... logger [request=... attempt=...] message``."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        logging.Formatter(
            "%(asctime)s %(levelname)s worker=%(worker)s %(name)s %(request)s%(message)s"
        )
    )
    handler.addFilter(_ContextFilter(worker))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for noisy in ("httpx", "asyncio", "transformers", "urllib3", "zmq"):
        logging.getLogger(noisy).setLevel("WARNING")
