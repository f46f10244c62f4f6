"""Whatever connects to a control port, the worker behind it serves its peers and stays as it is.

Ports are scanned, load balancers knock, and someone may mean harm: bytes that are no ZMTP, half a
handshake, a connection that never ends, another mechanism, a peer that does not read.
"""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import zmq
import zmq.asyncio

from core.channel import ChannelKeys, ClientChannel, ClientLost, DeploymentKeys
from core.ids import Attempt, Incarnation, RequestId
from core.messages import Abort, Hello, encode
from tests.core.door import ABORT, Door, channel, open_door

KEYS = DeploymentKeys.generate()
ROUTER, DECODE = KEYS.of("router"), KEYS.of("decode")
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"CURVE".ljust(20, b"\0") + b"\0" + bytes(31)
"""Of a ZMTP 3.1 client, per https://rfc.zeromq.org/spec/23/."""


def port_of(door: Door) -> tuple[str, int]:
    host, port = door.server.address.removeprefix("tcp://").split(":")
    return host, int(port)


async def is_cut(reader: asyncio.StreamReader) -> None:
    """Return once the server has closed the connection."""
    async with asyncio.timeout(60):
        try:
            while await reader.read(65536):
                pass
        except ConnectionError:
            pass


@asynccontextmanager
async def door_with_peer() -> AsyncIterator[tuple[Door, ClientChannel]]:
    """A server, and a peer of it that must notice nothing."""
    async with open_door(DECODE) as door:
        peer = channel(door, ROUTER, "decode", "peer")
        await peer.connect()
        yield door, peer
        await still_serves(door, peer)
        peer.close()


async def still_serves(door: Door, peer: ClientChannel) -> None:
    """The peer's messages arrive, and a new peer is welcome."""
    message = Abort(RequestId(f"after-{len(door.events)}"), Attempt(1))
    peer.send(message)
    await door.until(lambda: message in [event for _, event in door.events])
    new = channel(door, ROUTER, "decode", "new")
    await new.connect()
    new.close()


@pytest.mark.parametrize(
    "opening",
    [
        b"GET / HTTP/1.1\r\nHost: worker\r\n\r\n" * 10,
        bytes(100_000),
        GREETING[:11] + b"\x03\x00NULL" + bytes(50),
        GREETING.replace(b"CURVE", b"PLAIN"),
        GREETING + b"\x04\xff" + b"\xff" * 8,  # a command of 2^64 - 1 bytes
        GREETING + b"\x04\xc8\x05HELLO" + bytes(194),  # a HELLO that opens no box
        GREETING + b"\x00\x05hello",  # a message before the handshake
    ],
    ids=["http", "zeros", "null", "plain", "huge", "hello", "early"],
)
async def test_bytes_that_are_no_handshake_end_their_connection_alone(
    opening: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("core.channel_sockets.HANDSHAKE_TIMEOUT_S", 1.0)
    async with door_with_peer() as (door, _):
        reader, writer = await asyncio.open_connection(*port_of(door))
        writer.write(opening)
        await is_cut(reader)
        writer.close()
        if opening.startswith(GREETING[:11]):  # what is not even ZMTP is not told by the library
            await door.until(lambda: door.server.rejects.counts["handshake"])
        assert len(door.hellos) == 1


async def test_random_bytes_end_their_connections_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("core.channel_sockets.HANDSHAKE_TIMEOUT_S", 1.0)
    generator = random.Random(7)
    connections: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
    async with door_with_peer() as (door, _):
        for _ in range(60):
            reader, writer = await asyncio.open_connection(*port_of(door))
            start = GREETING[: generator.randrange(11, len(GREETING))]
            writer.write(start + generator.randbytes(generator.randrange(2000)))
            connections.append((reader, writer))
        await asyncio.gather(*(is_cut(reader) for reader, _ in connections))
        for _, writer in connections:
            writer.close()
        await door.until(lambda: door.server.rejects.counts["handshake"] >= 30)
        assert len(door.hellos) == 1


async def test_connections_that_never_finish_their_handshake_are_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("core.channel_sockets.HANDSHAKE_TIMEOUT_S", 0.5)
    async with door_with_peer() as (door, peer):
        # Given connections that send nothing, and some that send one byte now and then
        connections = [await asyncio.open_connection(*port_of(door)) for _ in range(100)]

        async def drip(writer: asyncio.StreamWriter) -> None:
            for byte in GREETING:
                writer.write(bytes([byte]))
                await asyncio.sleep(0.1)

        dripping = [asyncio.create_task(drip(writer)) for _, writer in connections[:20]]
        # When the peers go on
        await still_serves(door, peer)
        # Then each of the others is cut off within the bound
        await asyncio.gather(*(is_cut(reader) for reader, _ in connections))
        await asyncio.gather(*dripping, return_exceptions=True)
        assert door.server.rejects.counts["handshake"] >= 100
        for _, writer in connections:
            writer.close()


def raw_socket(context: zmq.asyncio.Context, keys: ChannelKeys) -> zmq.asyncio.Socket:
    """A peer's socket without any of our manners."""
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.curve_serverkey = DECODE.own.public
    socket.curve_publickey, socket.curve_secretkey = keys.own.public, keys.own.secret
    return socket


@asynccontextmanager
async def unruly(door: Door) -> AsyncIterator[zmq.asyncio.Socket]:
    """A connection that is admitted, and then does as the test likes."""
    context = zmq.asyncio.Context()
    socket = raw_socket(context, ROUTER)
    socket.connect(door.server.address)
    yield socket
    context.destroy(linger=0)


async def test_admitted_peer_that_sends_nonsense_is_counted_and_harms_nobody() -> None:
    generator = random.Random(3)
    hello = encode(Hello(name="u", incarnation=Incarnation("u")))
    async with door_with_peer() as (door, _), unruly(door) as socket:
        await socket.send(hello)
        for _ in range(50):
            await socket.send(generator.randbytes(generator.randrange(300)))
        await socket.send_multipart([b"two", b"frames"])
        await socket.send_multipart([b""] * 100)
        nested = b"\x83\xa4type\xa4Ping\xa1z" + b"\x91" * 500_000 + b"\x90\xa1y\x90"
        await socket.send(nested)
        await door.until(lambda: door.server.rejects.counts["message"] >= 53)
        assert [event for _, event in door.events] == [ClientLost()]


async def test_message_beyond_the_bound_cuts_its_sender_off() -> None:
    async with door_with_peer() as (door, _), unruly(door) as socket:
        monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        await socket.send(encode(Hello(name="u", incarnation=Incarnation("u"))))
        await socket.send(bytes(17 * 2**20))
        async with asyncio.timeout(60):
            await monitor.recv_multipart()
        assert not door.events


async def test_second_hello_changes_nothing_and_another_process_on_it_is_lost() -> None:
    async with door_with_peer() as (door, _), unruly(door) as socket:
        hello = Hello(name="u", incarnation=Incarnation("u1"))
        await socket.send(encode(hello))
        await socket.send(encode(hello))
        await socket.send(encode(ABORT))
        await door.until(lambda: [event for _, event in door.events] == [ABORT])
        assert len(door.hellos) == 2  # the peer's, and the first one
        (client, _) = door.events[0]
        await socket.send(encode(Hello(name="u", incarnation=Incarnation("u2"))))
        await socket.send(encode(ABORT))
        await door.until(lambda: door.events[1:] == [(client, ClientLost())])
        await door.until(lambda: door.server.rejects.counts["protocol"] == 3)


async def test_client_that_slept_is_told_apart_from_one_that_never_said_hello() -> None:
    async with open_door(DECODE, silence_s=0.4) as door, unruly(door) as socket:
        await socket.send(encode(ABORT))
        await door.until(lambda: door.server.rejects.counts["protocol"] == 1)
        await socket.send(encode(Hello(name="u", incarnation=Incarnation("u"))))
        await door.until(lambda: [event for _, event in door.events] == [ClientLost()])
        await socket.send(encode(ABORT))
        await door.until(lambda: door.server.rejects.counts["stale_client"] == 1)
        assert door.server.rejects.counts["protocol"] == 1
        # And is taken again when it says Hello
        await socket.send(encode(Hello(name="u", incarnation=Incarnation("u"))))
        await socket.send(encode(ABORT))
        await door.until(lambda: door.events[1:] and door.events[1][1] == ABORT)


async def test_peer_that_does_not_read_is_lost_and_holds_a_bounded_queue(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("core.channel_sockets.MAX_UNSENT_MESSAGES", 50)
    async with door_with_peer() as (door, _), unruly(door) as socket:
        socket.setsockopt(zmq.RCVHWM, 1)
        await socket.send(encode(Hello(name="u", incarnation=Incarnation("u"))))
        await socket.send(encode(ABORT))
        await door.until(lambda: door.events)
        (client, _) = door.events[0]
        long = Abort(RequestId("x" * 100_000), Attempt(1))
        for _ in range(2000):
            door.server.send(client, long)
            if door.server.party(client) is None:
                break
        await door.until(lambda: (client, ClientLost()) in door.events)
        assert door.server.rejects.counts["load"] == 1
