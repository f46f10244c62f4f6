"""Sockets of control channels: what both sides set, and what the transport tells about them."""

import asyncio
from typing import Any, Final

import zmq
import zmq.asyncio

MAX_MESSAGE_NBYTES: Final = 16 * 1024 * 1024
"""A prompt of a million tokens has 5 MB. A peer that sends more is cut off by the transport."""
MAX_QUEUED_MESSAGES: Final = 1024
"""Read from one connection and not taken by our loop yet; its peer waits beyond that."""
MAX_UNSENT_MESSAGES: Final = 65_536
"""Queued for one peer that does not read."""
HANDSHAKE_TIMEOUT_S: Final = 5.0
"""From accepting a connection until its peer has proved its key."""

DISCONNECTS: Final = zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED | zmq.EVENT_CONNECT_RETRIED
UNFINISHED_HANDSHAKES: Final = (
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)
REFUSED_KEYS: Final = zmq.EVENT_HANDSHAKE_FAILED_AUTH


def configure(socket: zmq.asyncio.Socket) -> None:
    """Bound what ``socket`` holds for a peer, and how long a silent one is kept."""
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, MAX_UNSENT_MESSAGES)
    socket.setsockopt(zmq.RCVHWM, MAX_QUEUED_MESSAGES)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_NBYTES)
    socket.setsockopt(zmq.HANDSHAKE_IVL, int(HANDSHAKE_TIMEOUT_S * 1000))
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)


def ignore_result(future: "asyncio.Future[Any]") -> None:
    """Done-callback for a send whose failure shows elsewhere."""
    if not future.cancelled():
        future.exception()
