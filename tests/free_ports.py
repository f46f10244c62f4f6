"""Ports for what a test starts seconds later, in a process of its own."""

import random
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from core.errors import ConfigError
from deploy.cluster.ports import claim_port

PORTS = range(20_000, 30_000)
"""Below those that Linux gives to whoever asks for any, and above those of Ray's workers."""
NUM_TRIES = 100
_given: set[int] = set()


def free_port(host: str = "127.0.0.1") -> int:
    """Return a port of ``host`` that is free, and that nobody is given until it is listened on.

    What is bound to port 0 in between, as by each of Ray's processes, would now and then get one
    that had been found free by the same means.
    """
    for port in random.sample([port for port in PORTS if port not in _given], NUM_TRIES):
        with suppress(ConfigError):
            claim_port(host, port, field="test")
            _given.add(port)
            return port
    raise AssertionError(f"none of {NUM_TRIES} ports of {host} is free")


@contextmanager
def refused_port(host: str = "127.0.0.1") -> Iterator[int]:
    """Yield a port at which every connection is refused: it is taken, and nobody listens there."""
    with socket.socket() as holder:
        holder.bind((host, 0))
        yield holder.getsockname()[1]
