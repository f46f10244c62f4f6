"""The side of a channel that connects: to one life of one server, and never again."""

import asyncio
import logging

import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from core.channel_keys import ChannelKeys, PublicKey
from core.channel_sockets import (
    DISCONNECTS,
    REFUSED_KEYS,
    UNFINISHED_HANDSHAKES,
    configure,
    ignore_result,
)
from core.errors import HandshakeError, PeerLostError, TransferError
from core.messages import AnyMessage, Hello, Party, Ping, Pong, Refused, Welcome, decode, encode

log = logging.getLogger(__name__)

PING_INTERVAL_S = 1.0


class ClientChannel:
    """Owned by one event loop; create it inside that loop.

    While the server's keys are rotated it is tried with each of them.
    """

    def __init__(
        self,
        address: str,
        *,
        keys: ChannelKeys,
        server: Party,
        hello: Hello,
        silence_s: float = 5.0,
    ) -> None:
        self.address = address
        self._keys = keys
        self._server: Party = server
        self._hello = hello
        self._silence_s = silence_s
        self._connection: _Connection | None = None
        self._is_closed = False
        self._welcome: Welcome | None = None
        self._last_heard = 0.0
        self._keeping_alive: asyncio.Task[None] | None = None

    async def connect(self, *, timeout_s: float = 5.0) -> Welcome:
        """Say Hello and return the Welcome.

        Raises:
            HandshakeError: the server refused, for the reason in the message.
            PeerLostError: nothing answers at the address within ``timeout_s``.
        """
        try:
            async with asyncio.timeout(timeout_s):
                answer = await self._say_hello()
        except TimeoutError as error:
            self.close()
            raise PeerLostError(f"no answer from {self.address} in {timeout_s} s") from error
        except PeerLostError:
            self.close()
            raise
        if not isinstance(answer, Welcome):
            self.close()
            reason = answer.reason if isinstance(answer, Refused) else type(answer).__name__
            raise HandshakeError(f"{self.address} refused {self._hello.name}: {reason}")
        self._welcome = answer
        self._last_heard = asyncio.get_running_loop().time()
        self._keeping_alive = asyncio.create_task(self._keep_alive())
        return answer

    def send(self, message: AnyMessage) -> None:
        """Queue ``message``. It is lost if the server is; ``receive`` tells."""
        if self._connection is not None:
            self._connection.send(message)

    async def receive(self) -> AnyMessage:
        """Return the server's next message.

        Raises:
            PeerLostError: the server is gone, silent, or restarted. Final: close the channel.
        """
        while True:
            if self._connection is None:
                raise PeerLostError(f"{self.address}: channel closed")
            message = await self._connection.next_message()
            self._last_heard = asyncio.get_running_loop().time()
            if isinstance(message, Refused):
                self._connection.lose(f"refused: {message.reason}")
            elif not isinstance(message, Pong):
                return message
            elif self._welcome is None or message.incarnation != self._welcome.incarnation:
                self._connection.lose("restarted")

    def close(self) -> None:
        """Close at once; queued messages may be lost. ``receive`` raises from now on."""
        self._is_closed = True
        if self._keeping_alive is not None:
            self._keeping_alive.cancel()
            self._keeping_alive = None
        if self._connection is not None:
            self._connection.close("channel closed")

    async def _say_hello(self) -> AnyMessage:
        """Return the answer to Hello of the first of the server's keys that leads to one."""
        lost = PeerLostError(f"{self.address}: no key of {self._server} is known")
        for key in self._keys.public.of(self._server):
            if self._is_closed:
                break
            if self._connection is not None:
                self._connection.close("another key is tried")
            self._connection = _Connection(self.address, keys=self._keys, server_key=key)
            self._connection.send(self._hello)
            try:
                return await self._connection.next_message()
            except PeerLostError as error:
                lost = error
        raise lost

    async def _keep_alive(self) -> None:
        loop = asyncio.get_running_loop()
        interval_s = min(PING_INTERVAL_S, self._silence_s / 4)
        while self._connection is not None:
            self.send(Ping())
            slept_from = loop.time()
            await asyncio.sleep(interval_s)
            if loop.time() - slept_from > 2 * interval_s:
                # This loop stood still, or the machine did: what came meanwhile is not read yet.
                self._last_heard = loop.time()
            silent_s = loop.time() - self._last_heard
            if silent_s > self._silence_s:
                self._connection.lose(f"silent for {silent_s:.1f} s")


class _Connection:
    """One TCP connection, under one of the server's keys."""

    def __init__(self, address: str, *, keys: ChannelKeys, server_key: PublicKey) -> None:
        """Begin to connect.

        Raises:
            PeerLostError: ``address`` is none.
        """
        self._address = address
        self._lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._incoming: asyncio.Future[bytes] | None = None
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        configure(self._socket)
        # What this process owes a server that does not read is bounded by its silence.
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RECONNECT_IVL, -1)
        self._socket.curve_serverkey = server_key
        self._socket.curve_publickey = keys.own.public
        self._socket.curve_secretkey = keys.own.secret
        self._monitor = self._socket.get_monitor_socket(
            DISCONNECTS | REFUSED_KEYS | UNFINISHED_HANDSHAKES
        )
        try:
            self._socket.connect(address)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise PeerLostError(f"{address!r} is no address: {error.strerror}") from error
        self._watching = asyncio.create_task(self._watch())

    def send(self, message: AnyMessage) -> None:
        """Queue ``message``; lost with the connection."""
        if not self._socket.closed:
            future = asyncio.ensure_future(self._socket.send(encode(message)))
            future.add_done_callback(ignore_result)

    async def next_message(self) -> AnyMessage:
        """Return what the server says next.

        Raises:
            PeerLostError: the connection is lost. Something unreadable loses it, too: what it was
                is missing, and whoever waits for it would wait for ever.
        """
        while True:
            if self._lost.done():
                raise PeerLostError(f"{self._address}: {self._lost.result()}")
            # As in the server: never cancelled, or a message that has just come would be lost.
            if self._incoming is None:
                self._incoming = asyncio.ensure_future(self._socket.recv())
            if not self._incoming.done():
                await asyncio.wait(
                    {self._incoming, self._lost}, return_when=asyncio.FIRST_COMPLETED
                )
            else:
                await asyncio.sleep(0)  # who always has another message must not stop the loop
            if self._lost.done() or not self._incoming.done():
                continue  # closing the socket cancels its future, which must not cancel our caller
            incoming, self._incoming = self._incoming, None
            try:
                return decode(incoming.result())
            except TransferError as error:
                self.lose(str(error))

    def lose(self, reason: str) -> None:
        """``next_message`` raises from now on."""
        if not self._lost.done():
            self._lost.set_result(reason)

    def close(self, reason: str) -> None:
        """Close at once."""
        self.lose(reason)
        self._watching.cancel()
        if not self._socket.closed:
            self._socket.disable_monitor()
            self._context.destroy(linger=0)

    async def _watch(self) -> None:
        event = parse_monitor_message(await self._monitor.recv_multipart())["event"]
        refused = event & REFUSED_KEYS
        self.lose("the server does not accept our keys" if refused else "connection closed")
