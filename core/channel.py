"""Authenticated message channels between router and workers: zmq, CURVE, msgpack.

A client says Hello and is answered Welcome or Refused; then both sides send messages, and both
learn within ``silence_s`` that the other is gone. A channel never reconnects: after a loss the
owner opens a new one, whose Welcome carries the incarnation that it now talks to. Messages may be
lost with their peer; they are never reordered or duplicated.

Source: CURVE per https://rfc.zeromq.org/spec/26/, ZAP allow-list per https://rfc.zeromq.org/spec/27/.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Self

import msgspec
import zmq
import zmq.asyncio
from zmq.auth.asyncio import AsyncioAuthenticator
from zmq.utils.monitor import parse_monitor_message

from core.errors import ConfigError, HandshakeError, PeerLostError, TransferError
from core.ids import Incarnation
from core.messages import (
    PROTOCOL_VERSION,
    AnyMessage,
    Hello,
    Ping,
    Pong,
    Refused,
    Welcome,
    decode,
    encode,
)

log = logging.getLogger(__name__)

PING_INTERVAL_S = 1.0
NUM_FRAMES = 2
MAX_MESSAGE_NBYTES = 64 * 1024 * 1024
DISCONNECTS = zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED | zmq.EVENT_CONNECT_RETRIED
AUTH_FAILURES = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)

ClientId = bytes
"""One connection of one client; a reconnecting client has a new one."""


class ChannelKeys(msgspec.Struct, frozen=True):
    """One deployment's CURVE keys, z85. Whoever holds them may talk to its workers."""

    server_public: bytes
    server_secret: bytes
    client_public: bytes
    client_secret: bytes

    @classmethod
    def generate(cls) -> Self:
        """Return fresh random keys."""
        server_public, server_secret = zmq.curve_keypair()
        client_public, client_secret = zmq.curve_keypair()
        return cls(server_public, server_secret, client_public, client_secret)


class ClientLost(msgspec.Struct, frozen=True):
    """The client was silent for the channel's bound. Nothing more comes of it."""


class _OneClientKey:
    """ZAP credentials provider that admits the deployment's client key alone."""

    def __init__(self, client_public: bytes) -> None:
        self._client_public = client_public

    def callback(self, domain: str, key: bytes) -> bool:  # noqa: ARG002 - zmq names it
        """Return whether ``key`` (z85) may connect."""
        return key == self._client_public


class ServerChannel:
    """The side that binds. Owned by one event loop; create it inside that loop.

    Raises:
        ConfigError: the port is taken or the host is not of this machine.
    """

    def __init__(
        self,
        *,
        host: str,
        keys: ChannelKeys,
        incarnation: Incarnation,
        welcome: Callable[[ClientId, Hello], Welcome | Refused],
        port: int = 0,
        silence_s: float = 5.0,
    ) -> None:
        self._incarnation = incarnation
        self._welcome = welcome
        self._silence_s = silence_s
        self._last_seen: dict[ClientId, float] = {}
        self._next_look = 0.0
        self._lost: list[ClientId] = []
        self._incoming: asyncio.Future[list[bytes]] | None = None
        self._context = zmq.asyncio.Context()
        self._authenticator = AsyncioAuthenticator(self._context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback(
            domain="*", credentials_provider=_OneClientKey(keys.client_public)
        )
        self._socket = self._context.socket(zmq.ROUTER)
        _configure(self._socket)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.curve_server = True
        self._socket.curve_secretkey = keys.server_secret
        self._socket.curve_publickey = keys.server_public
        try:
            self._socket.bind(f"tcp://{host}:{port or '*'}")
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}") from error
        endpoint: bytes = self._socket.getsockopt(zmq.LAST_ENDPOINT)  # pyright: ignore[reportAssignmentType]
        self.address = endpoint.decode().rstrip("\0")
        self.num_dropped = 0
        """Messages that were unreadable, came before Hello, or had no client to go to."""

    async def receive(self) -> tuple[ClientId, AnyMessage | ClientLost]:
        """Return the next message of any client, or that a client is lost."""
        while True:
            if self._lost:
                return self._lost.pop(), ClientLost()
            frames, was_waited_for = await self._next_frames()
            message = self._accept(*frames) if len(frames) == NUM_FRAMES else None
            self.num_dropped += len(frames) not in {0, NUM_FRAMES}
            if was_waited_for:
                self._find_silent()
            if message is not None:
                return frames[0], message

    def send(self, client: ClientId, message: AnyMessage) -> None:
        """Queue ``message``; it is dropped and counted where the client is gone."""
        sending = self._socket.send_multipart([client, encode(message)])  # pyright: ignore[reportUnknownMemberType]
        future = asyncio.ensure_future(sending)
        future.add_done_callback(self._count_failed_send)

    def close(self) -> None:
        """Close at once; queued messages may be lost."""
        self._authenticator.stop()
        self._context.destroy(linger=0)

    async def _next_frames(self) -> tuple[list[bytes], bool]:
        """Return one message's frames, none after a while, and whether nothing was there before.

        Who is silent may be asked only in the latter case: after this loop was busy, what a client
        has sent meanwhile counts as heard. The socket's future outlives this call, and is never
        cancelled: a cancel that meets a message which has just come would lose it.
        """
        if self._incoming is None:
            self._incoming = asyncio.ensure_future(self._socket.recv_multipart())
        was_waited_for = not self._incoming.done()
        if was_waited_for:
            await asyncio.wait({self._incoming}, timeout=self._silence_s / 4)
            if not self._incoming.done():
                return [], True
        incoming, self._incoming = self._incoming, None
        return incoming.result(), was_waited_for

    def _accept(self, client: ClientId, payload: bytes) -> AnyMessage | None:
        """Return the message if it is for the owner; answer Hello and Ping here."""
        try:
            message = decode(payload)
        except TransferError as error:
            self.num_dropped += 1
            log.warning("dropped=message reason=%s", error)
            return None
        if isinstance(message, Hello):
            self._answer_hello(client, message)
            return None
        if client not in self._last_seen:
            self.num_dropped += 1
            self.send(client, Refused(reason="a channel starts with Hello; connect again"))
            return None
        self._last_seen[client] = asyncio.get_running_loop().time()
        if isinstance(message, Ping):
            self.send(client, Pong(incarnation=self._incarnation))
            return None
        return message

    def _answer_hello(self, client: ClientId, hello: Hello) -> None:
        if hello.protocol_version != PROTOCOL_VERSION:
            answer: Welcome | Refused = Refused(
                reason=f"protocol version {hello.protocol_version} of {hello.name} is not "
                f"{PROTOCOL_VERSION}; run one Sluice version on all workers"
            )
        else:
            answer = self._welcome(client, hello)
        if isinstance(answer, Welcome):
            self._last_seen[client] = asyncio.get_running_loop().time()
        self.send(client, answer)

    def _find_silent(self) -> None:
        now = asyncio.get_running_loop().time()
        if now < self._next_look:
            return
        self._next_look = now + self._silence_s / 4
        silent = [c for c, seen in self._last_seen.items() if seen < now - self._silence_s]
        for client in silent:
            del self._last_seen[client]
            self._lost.append(client)

    def _count_failed_send(self, future: "asyncio.Future[Any]") -> None:
        if not future.cancelled() and future.exception() is not None:
            self.num_dropped += 1


class ClientChannel:
    """The side that connects. Owned by one event loop; create it inside that loop."""

    def __init__(
        self, address: str, *, keys: ChannelKeys, hello: Hello, silence_s: float = 5.0
    ) -> None:
        self.address = address
        self._hello = hello
        self._silence_s = silence_s
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        _configure(self._socket)
        self._socket.setsockopt(zmq.RECONNECT_IVL, -1)
        self._socket.curve_serverkey = keys.server_public
        self._socket.curve_publickey = keys.client_public
        self._socket.curve_secretkey = keys.client_secret
        self._monitor = self._socket.get_monitor_socket(DISCONNECTS | AUTH_FAILURES)
        self._lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._incoming: asyncio.Future[bytes] | None = None
        self._welcome: Welcome | None = None
        self._last_heard = 0.0
        self._tasks: list[asyncio.Task[None]] = []

    async def connect(self, *, timeout_s: float = 5.0) -> Welcome:
        """Say Hello and return the Welcome.

        Raises:
            HandshakeError: the server refused, for the reason in the message.
            PeerLostError: nothing answers at the address within ``timeout_s``.
        """
        try:
            self._socket.connect(self.address)
        except zmq.ZMQError as error:
            self.close()
            raise PeerLostError(f"{self.address!r} is no address: {error.strerror}") from error
        self._tasks.append(asyncio.create_task(self._watch_connection()))
        self.send(self._hello)
        try:
            async with asyncio.timeout(timeout_s):
                answer = await self._next_message()
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
        self._tasks.append(asyncio.create_task(self._keep_alive()))
        return answer

    def send(self, message: AnyMessage) -> None:
        """Queue ``message``. It is lost if the server is; ``receive`` tells."""
        if not self._socket.closed:
            future = asyncio.ensure_future(self._socket.send(encode(message)))
            future.add_done_callback(_ignore_result)

    async def receive(self) -> AnyMessage:
        """Return the server's next message.

        Raises:
            PeerLostError: the server is gone, silent, or restarted. Final: close the channel.
        """
        while True:
            message = await self._next_message()
            self._last_heard = asyncio.get_running_loop().time()
            if isinstance(message, Refused):
                self._lose(f"refused: {message.reason}")
            elif not isinstance(message, Pong):
                return message
            elif self._welcome is None or message.incarnation != self._welcome.incarnation:
                self._lose("restarted")

    def close(self) -> None:
        """Close at once; queued messages may be lost. ``receive`` raises from now on."""
        self._lose("channel closed")
        for task in self._tasks:
            task.cancel()
        self._tasks.clear()
        if not self._socket.closed:
            self._socket.disable_monitor()
            self._context.destroy(linger=0)

    async def _next_message(self) -> AnyMessage:
        while True:
            if self._lost.done():
                raise PeerLostError(f"{self.address}: {self._lost.result()}")
            # As in the server: never cancelled, or a message that has just come would be lost.
            if self._incoming is None:
                self._incoming = asyncio.ensure_future(self._socket.recv())
            if not self._incoming.done():
                await asyncio.wait(
                    {self._incoming, self._lost}, return_when=asyncio.FIRST_COMPLETED
                )
            if self._lost.done() or not self._incoming.done():
                continue  # closing the socket cancels its future, which must not cancel our caller
            incoming, self._incoming = self._incoming, None
            try:
                return decode(incoming.result())
            except TransferError as error:
                log.warning("dropped=message server=%s reason=%s", self.address, error)

    async def _keep_alive(self) -> None:
        loop = asyncio.get_running_loop()
        interval_s = min(PING_INTERVAL_S, self._silence_s / 4)
        while True:
            self.send(Ping())
            slept_from = loop.time()
            await asyncio.sleep(interval_s)
            if loop.time() - slept_from > 2 * interval_s:
                # This loop stood still, or the machine did: what came meanwhile is not read yet.
                self._last_heard = loop.time()
            silent_s = loop.time() - self._last_heard
            if silent_s > self._silence_s:
                self._lose(f"silent for {silent_s:.1f} s")

    async def _watch_connection(self) -> None:
        frames = await self._monitor.recv_multipart()
        event = parse_monitor_message(frames)["event"]
        refused = event & AUTH_FAILURES
        self._lose("the server does not accept our keys" if refused else "connection closed")

    def _lose(self, reason: str) -> None:
        if not self._lost.done():
            self._lost.set_result(reason)


def _configure(socket: zmq.asyncio.Socket) -> None:
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_NBYTES)
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)


def _ignore_result(future: "asyncio.Future[Any]") -> None:
    if not future.cancelled():
        future.exception()
