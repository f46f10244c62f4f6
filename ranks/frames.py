"""Messages between the ranks of one worker: pickles behind their length, over a socket pair.

The pair is made by the leader and inherited by one follower: nobody else can speak on it, which is
what makes it right to unpickle what comes.
"""

import asyncio
import pickle
import socket
import struct
from collections.abc import Callable, Iterator

_HEADER = struct.Struct("<Q")
_CHUNK_NBYTES = 2**18


def send_frame(sock: socket.socket, message: object) -> None:
    """Send ``message``; blocks for the socket's timeout at most.

    Raises:
        OSError: the other side is gone, or took nothing in time. The socket is of no use any more.
    """
    sock.sendall(_encoded(message))


def receive_frame(sock: socket.socket) -> object:
    """Return the next message; blocks for the socket's timeout at most.

    Raises:
        OSError: the other side is gone, or sent nothing in time. The socket is of no use any more.
    """
    (nbytes,) = _HEADER.unpack(_receive(sock, _HEADER.size))
    return pickle.loads(_receive(sock, nbytes))  # noqa: S301 - from our own process


class FrameChannel:
    """One end on an event loop; ``send`` never blocks, order is kept.

    ``on_message`` is called from the loop for each message, ``on_lost`` once when the other side is
    gone, and neither after ``close``.
    """

    def __init__(
        self,
        sock: socket.socket,
        *,
        on_message: Callable[[object], None],
        on_lost: Callable[[], None],
    ) -> None:
        sock.settimeout(0)
        self._sock = sock
        self._on_message = on_message
        self._on_lost = on_lost
        self._loop = asyncio.get_running_loop()
        self._incoming = bytearray()
        self._outgoing = bytearray()
        self._is_closed = False
        self._loop.add_reader(sock, self._read)

    def send(self, message: object) -> None:
        """Send ``message`` behind all earlier ones. To a side that is gone, nothing is sent."""
        if self._is_closed:
            return
        is_waiting = bool(self._outgoing)
        self._outgoing += _encoded(message)
        if not is_waiting:
            self._write()

    def close(self) -> None:
        """Forget what was not sent or read yet."""
        if not self._is_closed:
            self._is_closed = True
            self._loop.remove_reader(self._sock)
            self._loop.remove_writer(self._sock)
            self._sock.close()

    def _write(self) -> None:
        try:
            del self._outgoing[: self._sock.send(self._outgoing)]
        except BlockingIOError:
            pass
        except OSError:
            self._loop.remove_writer(self._sock)
            self._outgoing.clear()
            return  # the reader sees the end of the other side, and says so
        if self._outgoing:
            self._loop.add_writer(self._sock, self._write)
        else:
            self._loop.remove_writer(self._sock)

    def _read(self) -> None:
        try:
            received = self._sock.recv(_CHUNK_NBYTES)
        except BlockingIOError:
            return
        except OSError:
            received = b""
        if not received:
            self.close()
            self._on_lost()
            return
        self._incoming += received
        self._tell()

    def _tell(self) -> None:
        """Tell every message that is here whole; one that cannot be taken strands no later one."""
        messages = self._messages()
        try:
            for message in messages:
                if not self._is_closed:
                    self._on_message(message)
        except BaseException:
            self._loop.call_soon(self._tell)
            raise

    def _messages(self) -> Iterator[object]:
        while len(self._incoming) >= _HEADER.size:
            (nbytes,) = _HEADER.unpack_from(self._incoming)
            end = _HEADER.size + nbytes
            if len(self._incoming) < end:
                return
            body = bytes(self._incoming[_HEADER.size : end])
            del self._incoming[:end]
            yield pickle.loads(body)  # noqa: S301 - as above


def _encoded(message: object) -> bytes:
    body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return _HEADER.pack(len(body)) + body


def _receive(sock: socket.socket, nbytes: int) -> bytes:
    parts = bytearray()
    while len(parts) < nbytes:
        received = sock.recv(min(nbytes - len(parts), _CHUNK_NBYTES))
        if not received:
            raise ConnectionResetError("the other rank is gone")
        parts += received
    return bytes(parts)
