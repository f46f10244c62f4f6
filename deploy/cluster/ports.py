"""Ports that are settled before anything starts."""

import socket

from core.errors import ConfigError


def claim_port(host: str, port: int, *, field: str) -> int:
    """Return ``port``, or a free one for 0, having checked that ``host`` can listen on it.

    The port is not held: the service that it is for binds it a few seconds later, and again at
    the same number when it is restarted.

    Raises:
        ConfigError: the port is taken, or the host is not of this machine; names ``field``.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen(1)
        except OSError as error:
            raise ConfigError(
                f"{field}: cannot listen on {host}:{port} ({error.strerror or error}); "
                "stop what listens there or choose another with --port or --host"
            ) from error
        return probe.getsockname()[1]
