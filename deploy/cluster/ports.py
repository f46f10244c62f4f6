"""Ports that are settled before anything starts."""

import errno
import socket
from collections.abc import Generator
from contextlib import contextmanager

from core.errors import ConfigError


def claim_port(host: str, port: int, *, field: str) -> int:
    """Return ``port``, or a free one for 0, having checked that ``host`` can listen on it.

    The service that it is for binds it a few seconds later, and again at the same number when it
    is restarted; ``held`` keeps it until then.

    Raises:
        ConfigError: the port is taken, or the host is not of this machine; names ``field``.
    """
    with _reusing(host) as probe:
        try:
            probe.bind((host, port))
            probe.listen(1)
        except OSError as error:
            is_taken = error.errno in {errno.EADDRINUSE, errno.EACCES}
            fix = f"another {field}" if is_taken else "an address of this machine in router.host"
            raise ConfigError(
                f"{field}: cannot listen on {host}:{port} ({error.strerror or error}); "
                f"{'stop what listens there, or ' if is_taken else ''}give {fix}"
            ) from error
        return probe.getsockname()[1]


@contextmanager
def held(host: str, port: int) -> Generator[None]:
    """Keep ``port`` from whatever is given any free one, for the time of the ``with`` block.

    Nothing listens there. Our services do though it is held: they set SO_REUSEADDR, as asyncio and
    ZeroMQ do by themselves.
    """
    with _reusing(host) as holder:
        holder.bind((host, port))
        yield


def _reusing(host: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    opened = socket.socket(family, socket.SOCK_STREAM)
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return opened
