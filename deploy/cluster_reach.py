"""Whether a Ray cluster answers, in seconds: Ray asks a dead one for a quarter of an hour."""

import socket
from collections.abc import Callable

from deploy.bounded import run_bounded

CONNECT_TIMEOUT_S = 5.0
JOIN_TIMEOUT_S = 60.0


def join_in_time(
    init: Callable[[], object], address: str, *, timeout_s: float = JOIN_TIMEOUT_S
) -> None:
    """Call ``init``, which joins the cluster at ``address``, and wait for no longer than that.

    Raises:
        ConnectionError: nothing listens there, or what listens did not answer in time. The call
            is left behind then: the process is to end.
        Exception: what ``init`` raised.
    """
    require_listener(address)
    if not run_bounded(init, timeout_s=timeout_s):
        raise ConnectionError(f"it did not answer within {timeout_s:g} s")


def require_listener(address: str) -> None:
    """Return if something listens at ``address``, or it is no ``host:port``, such as ``auto``.

    Raises:
        ConnectionError: nothing does, or the host has no address.
    """
    host, _, port = address.rpartition(":")
    if not host or not (port.isascii() and port.isdecimal()) or "/" in host:
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_TIMEOUT_S).close()
    except (OSError, OverflowError) as error:
        raise ConnectionError(f"nothing answers there: {error}") from error


def cluster_started_here() -> str | None:
    """Return the address of the cluster that ``ray start`` has joined this machine to.

    None: there is none. Ray's own ``auto`` would take any Ray process that runs here, such as those
    of another user's private deployment, which answers nobody else.
    """
    from ray._private.utils import read_ray_address  # noqa: PLC0415 - reads the environment

    return read_ray_address() or None
