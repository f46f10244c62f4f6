"""The side of a channel that binds: admits clients by key, and takes what they say one by one."""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import zmq
import zmq.asyncio
from zmq.auth.asyncio import AsyncioAuthenticator
from zmq.utils.monitor import parse_monitor_message

from core.channel_keys import ChannelKeys, PublicKey
from core.channel_rejects import Reason, Rejects
from core.channel_sockets import REFUSED_KEYS, UNFINISHED_HANDSHAKES, configure
from core.errors import ConfigError, TransferError
from core.ids import Incarnation
from core.messages import (
    PROTOCOL_VERSION,
    AnyMessage,
    Hello,
    Party,
    Ping,
    Pong,
    Refused,
    Welcome,
    decode,
    encode,
)

log = logging.getLogger(__name__)

NUM_FRAMES = 2
MAX_CLIENTS = 4096

ClientId = bytes
"""One connection of one client; a reconnecting client has a new one."""


class ClientLost(msgspec.Struct, frozen=True):
    """The client was silent, or is not served any more. Nothing more comes of it."""


@dataclass(slots=True)
class _Client:
    incarnation: Incarnation
    key: PublicKey
    party: Party
    last_seen: float


class _AdmittedKeys:
    """ZAP credentials provider: whoever it does not know learns nothing and is never heard."""

    def __init__(self, keys: ChannelKeys) -> None:
        self._keys = keys

    def callback(self, domain: str, key: bytes) -> bool:  # noqa: ARG002 - zmq names it
        """Return whether ``key`` (Z85) may connect."""
        return self._keys.admits(key) is not None


class ServerChannel:
    """Owned by one event loop; create it inside that loop.

    A client is heard when its key is admitted, and served from its Hello on until it is silent,
    says what is unreadable or out of order, does not read what it is sent, or its key is withdrawn:
    then it is lost.

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
        self._keys = keys
        self._incarnation = incarnation
        self._welcome = welcome
        self._silence_s = silence_s
        self._clock = asyncio.get_running_loop().time
        self._clients: dict[ClientId, _Client] = {}
        self._given_up: OrderedDict[ClientId, None] = OrderedDict()
        """Were silent for too long: what they still send is no fault of theirs."""
        self._next_look = 0.0
        self._lost: list[ClientId] = []
        self._incoming: asyncio.Future[list[zmq.Frame]] | None = None
        self.rejects = Rejects()
        self._context = zmq.asyncio.Context()
        self._authenticator = AsyncioAuthenticator(self._context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback(
            domain="*", credentials_provider=_AdmittedKeys(keys)
        )
        self._socket = self._context.socket(zmq.ROUTER)
        configure(self._socket)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.curve_server = True
        self._socket.curve_secretkey = keys.own.secret
        self._socket.curve_publickey = keys.own.public
        self._monitor = self._socket.get_monitor_socket(REFUSED_KEYS | UNFINISHED_HANDSHAKES)
        self._watching = asyncio.create_task(self._watch_handshakes())
        try:
            self._socket.bind(f"tcp://{host}:{port or '*'}")
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}") from error
        endpoint: bytes = self._socket.getsockopt(zmq.LAST_ENDPOINT)  # pyright: ignore[reportAssignmentType]
        self.address = endpoint.decode().rstrip("\0")
        self.num_dropped = 0
        """Messages that were unreadable or out of order, or had no client to go to."""

    @property
    def num_clients(self) -> int:
        """Clients that are served."""
        return len(self._clients)

    async def receive(self) -> tuple[ClientId, AnyMessage | ClientLost]:
        """Return the next message of any client, or that a client is lost."""
        while True:
            if self._lost:
                return self._lost.pop(0), ClientLost()
            frames, was_waited_for = await self._next_frames()
            message = self._accept(frames) if frames else None
            if was_waited_for:
                self._find_silent()
            if message is not None:
                return frames[0].bytes, message

    def send(self, client: ClientId, message: AnyMessage) -> None:
        """Queue ``message``; it is dropped and counted where the client is gone.

        A client for which too much is queued is lost: messages of a channel are not skipped.
        """
        if self._socket.closed:
            return
        sending = self._socket.send_multipart([client, encode(message)], flags=zmq.NOBLOCK)  # pyright: ignore[reportUnknownMemberType]
        future = asyncio.ensure_future(sending)
        if future.done() and not future.cancelled():
            self._see_sent(client, future.exception())
        else:
            future.add_done_callback(lambda sent: self._see_sent(client, sent.exception()))

    def party(self, client: ClientId) -> Party | None:
        """Return whose key ``client`` has; None: it is not served any more."""
        known = self._clients.get(client)
        return None if known is None else known.party

    def close(self) -> None:
        """Close at once; queued messages may be lost."""
        self._watching.cancel()
        self._authenticator.stop()
        if not self._socket.closed:
            self._socket.disable_monitor()
        self._context.destroy(linger=0)

    async def _next_frames(self) -> tuple[list[zmq.Frame], bool]:
        """Return one message's frames, none after a while, and whether nothing was there before.

        Who is silent may be asked only in the latter case: after this loop was busy, what a client
        has sent meanwhile counts as heard. The socket's future outlives this call, and is never
        cancelled: a cancel that meets a message which has just come would lose it.
        """
        if self._incoming is None:
            self._incoming = asyncio.ensure_future(self._socket.recv_multipart(copy=False))
        was_waited_for = not self._incoming.done()
        if was_waited_for:
            waited_from, patience_s = self._clock(), self._silence_s / 4
            await asyncio.wait({self._incoming}, timeout=patience_s)
            if self._clock() > waited_from + 2 * patience_s:
                # This loop stood still, or the machine did: what came meanwhile is not read yet.
                for known in self._clients.values():
                    known.last_seen = self._clock()
            if not self._incoming.done():
                return [], True
        else:
            await asyncio.sleep(0)  # who always has another message must not stop the loop
        incoming, self._incoming = self._incoming, None
        return incoming.result(), was_waited_for

    def _accept(self, frames: list[zmq.Frame]) -> AnyMessage | None:
        """Return the message if it is for the owner; answer Hello and Ping here."""
        client = frames[0].bytes
        try:
            message = _decode(frames)
        except TransferError as error:
            self._reject("message", error)
            if client in self._clients:
                # Whoever waits for what it was would wait for ever.
                self._lose(client, Refused(reason=str(error)))
            return None
        known = self._clients.get(client)
        if isinstance(message, Hello):
            self._answer_hello(client, message, key=_user_of(frames[1]))
            return None
        if known is None:
            is_stale = client in self._given_up
            detail = "of a client that was silent" if is_stale else "before Hello"
            reason = "stale_client" if is_stale else "protocol"
            self._reject(reason, f"{type(message).__name__} {detail}")
            self.send(client, Refused(reason="a channel starts with Hello; connect again"))
            return None
        known.last_seen = self._clock()
        if isinstance(message, Ping):
            self.send(client, Pong(incarnation=self._incarnation))
            return None
        return message

    def _answer_hello(self, client: ClientId, hello: Hello, *, key: PublicKey) -> None:
        known = self._clients.get(client)
        if known is not None:
            self._reject("protocol", f"a second Hello of {hello.name}")
            if hello.incarnation != known.incarnation:
                self._lose(client, Refused(reason="one connection is of one process"))
            return
        party = self._keys.admits(key)
        if party is None:  # withdrawn since the transport asked
            self._reject("key", "a key that is not admitted")
            self.send(client, Refused(reason="its key is not admitted any more"))
            return
        self._given_up.pop(client, None)
        answer = self._answer_to(client, hello)
        if isinstance(answer, Welcome):
            self._clients[client] = _Client(hello.incarnation, key, party, self._clock())
        self.send(client, answer)

    def _answer_to(self, client: ClientId, hello: Hello) -> Welcome | Refused:
        if hello.protocol_version != PROTOCOL_VERSION:
            self._reject("version", hello.protocol_version)
            return Refused(
                reason=f"protocol version {hello.protocol_version} of {hello.name} is not "
                f"{PROTOCOL_VERSION}; run one Sluice version on all workers"
            )
        if len(self._clients) >= MAX_CLIENTS:
            self._reject("load", f"more than {MAX_CLIENTS} clients")
            return Refused(reason=f"more than {MAX_CLIENTS} clients")
        answer = self._welcome(client, hello)
        if isinstance(answer, Refused):
            self._reject("refused", answer.reason)
        return answer

    def _find_silent(self) -> None:
        """Lose who was silent for too long, or has a key that is not admitted any more."""
        now = self._clock()
        if now < self._next_look:
            return
        self._next_look = now + self._silence_s / 4
        for client, known in list(self._clients.items()):
            if known.last_seen < now - self._silence_s:
                self._lose(client)
                self._given_up[client] = None
                if len(self._given_up) > MAX_CLIENTS:
                    self._given_up.popitem(last=False)
            elif self._keys.admits(known.key) != known.party:
                self._reject("key", f"the key of a {known.party} was withdrawn")
                self._lose(client, Refused(reason="its key is not admitted any more"))

    def _lose(self, client: ClientId, last_word: Refused | None = None) -> None:
        """The owner is told; whatever ``client`` says from now on is out of order."""
        if self._clients.pop(client, None) is not None:
            self._lost.append(client)
        if last_word is not None:
            self.send(client, last_word)

    def _see_sent(self, client: ClientId, error: BaseException | None) -> None:
        if error is None:
            return
        self.num_dropped += 1
        if isinstance(error, zmq.Again) and client in self._clients:
            self._reject("load", "a client does not read what it is sent")
            self._lose(client)

    def _reject(self, reason: Reason, detail: object) -> None:
        self.num_dropped += reason in {"message", "protocol", "stale_client"}
        self.rejects.count(reason, detail, now=self._clock())

    async def _watch_handshakes(self) -> None:
        while True:
            event = parse_monitor_message(await self._monitor.recv_multipart())["event"]
            if event & REFUSED_KEYS:
                self._reject("key", "a key that is not admitted")
            else:
                self._reject("handshake", "a connection that did not prove a key")


def _decode(frames: list[zmq.Frame]) -> AnyMessage:
    if len(frames) != NUM_FRAMES:
        raise TransferError(f"peer sent {len(frames) - 1} frames instead of one")
    return decode(frames[1].buffer)


def _user_of(frame: zmq.Frame) -> PublicKey:
    """Return the key that the transport has verified for the connection of ``frame``."""
    user = frame.get("User-Id")
    return user.encode() if isinstance(user, str) else bytes(user)
