"""Joining a Ray cluster, in seconds: Ray asks one that is gone for a quarter of an hour."""

import logging
import socket
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from core.errors import ConfigError
from deploy.cluster.bounded import run_bounded
from deploy.cluster.ray_errors import on_one_line

CONNECT_TIMEOUT_S = 5.0
JOIN_TIMEOUT_S = 60.0


@contextmanager
def joined(address: str, setting: str, **arguments: Any) -> Generator[None]:  # noqa: ANN401
    """Connect this process to the Ray cluster at ``address`` for the time of the ``with`` block.

    What does not answer within ``JOIN_TIMEOUT_S`` is left behind, still asking: the process is to
    end then. Ray takes no signal handler here.

    Args:
        address: One of a cluster that runs.
        setting: By which the operator named it, for the error.
        arguments: Others of ``ray.init``.

    Raises:
        ConfigError: nothing listens there, it does not answer in time, or Ray refuses to join it.
    """
    import ray  # noqa: PLC0415 - reads the environment when it is imported
    from ray.exceptions import RayError  # noqa: PLC0415

    def join() -> None:
        # Not yet its warnings: one of them says that outside of the main thread it takes no signal.
        ray.init(address=address, logging_level=logging.ERROR, **arguments)  # pyright: ignore[reportUnknownMemberType]

    try:
        require_listener(address)
        if not run_bounded(join, timeout_s=JOIN_TIMEOUT_S):
            raise ConnectionError(f"it did not answer within {JOIN_TIMEOUT_S:g} s")
    except (OSError, ValueError, RuntimeError, RayError) as error:
        raise ConfigError(
            f"no Ray cluster can be joined at {address} ({on_one_line(error)}); check {setting}"
        ) from error
    try:
        yield
    finally:
        ray.shutdown()  # pyright: ignore[reportUnknownMemberType]


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


def file_of_cluster_started_here() -> str:
    """Return where ``ray start`` leaves that address, unless it was given a ``--temp-dir``."""
    from ray._common.utils import get_ray_address_file  # noqa: PLC0415 - reads the environment

    return get_ray_address_file(None)
