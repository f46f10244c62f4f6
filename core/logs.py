"""Structured logging: text lines of key=value, or one JSON object per line.

Of a line, JSON has ``ts`` (UTC), ``level``, ``logger``, ``worker``, ``role``, then ``request`` and
``attempt`` where it concerns a request, ``event``, and the fields of the message. A field of the
message that one of these names is taken for is ``subject_worker`` and so on: whom it is about.
"""

import json
import logging
import os
import sys
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Final, Literal, NamedTuple

from core.ids import Attempt, RequestId
from core.log_fields import Field, fields_of

LogFormat = Literal["text", "json"]

OWN_PACKAGES: Final = frozenset(
    {"core", "blockmgr", "transfer", "engine", "ranks", "prefill", "decode", "router", "deploy"}
)
"""Loggers whose messages have the form that ``core.log_fields`` reads."""
RESERVED: Final = frozenset({"ts", "level", "logger", "worker", "role", "exception"})


class HandledRequest(NamedTuple):
    """The sequence that a task works on, for every line that it logs."""

    request: RequestId
    attempt: Attempt
    """0 before the first."""


request_context: ContextVar[HandledRequest | None] = ContextVar("request_context", default=None)
"""Set while one request is being handled."""


class _ContextFilter(logging.Filter):
    def __init__(self, worker: str) -> None:
        super().__init__()
        self._worker = worker

    def filter(self, record: logging.LogRecord) -> bool:
        record.worker = self._worker
        handled = request_context.get()
        record.request = f"request={handled.request} attempt={handled.attempt} " if handled else ""
        return True


class JsonFormatter(logging.Formatter):
    """Writes a record as one line of JSON, exceptions included."""

    def __init__(self, *, worker: str, role: str) -> None:
        super().__init__()
        self._worker = worker
        self._role = role

    def format(self, record: logging.LogRecord) -> str:
        """See ``logging.Formatter``."""
        is_own = record.name.partition(".")[0] in OWN_PACKAGES
        fields = fields_of(record) if is_own else {"event": record.getMessage()}
        handled = request_context.get()
        line: dict[str, Field] = {
            "ts": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="microseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "worker": self._worker,
            "role": self._role,
            **({} if handled is None else handled._asdict()),
            **{_free(key): value for key, value in fields.items()},
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        if record.stack_info:
            line["stack"] = self.formatStack(record.stack_info)
        return json.dumps(line, default=str)


def set_up_logging(
    level: str, *, worker: str, role: str = "", log_format: LogFormat = "text"
) -> None:
    """Log this process to stderr; nothing but lines of JSON where the format is ``json``.

    To be called before libraries that show progress are imported.

    Args:
        level: The least severe that is written.
        worker: Whose lines these are.
        role: ``router``, ``prefill``, ``decode``, or ``deploy`` for the command itself.
        log_format: ``text``: ``time level worker=... logger [request=... attempt=...] message``.
    """
    handler = logging.StreamHandler(sys.stderr)
    if log_format == "json":
        handler.setFormatter(JsonFormatter(worker=worker, role=role))
        logging.captureWarnings(capture=True)
        # Read by tqdm when it is imported: bars of loaders would stand between the lines.
        os.environ["TQDM_DISABLE"] = "1"
    else:
        handler.addFilter(_ContextFilter(worker))
        handler.setFormatter(
            logging.Formatter(
                "%(asctime)s %(levelname)s worker=%(worker)s %(name)s %(request)s%(message)s"
            )
        )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for noisy in ("httpx", "asyncio", "transformers", "urllib3", "zmq"):
        logging.getLogger(noisy).setLevel("WARNING")


def _free(key: str) -> str:
    return f"subject_{key}" if key in RESERVED else key
