"""A peer that always has one more message to be read does not keep the event loop for itself.

What has come already is there without a wait. If taking it let nothing else run, one peer that
sends without a pause would stop the whole process: its steps, its leases, every other peer.
"""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import zmq

from core.channel import ClientChannel, ClientLost, DeploymentKeys, ServerChannel
from core.ids import Incarnation, WorkerId
from core.messages import Hello, Ping, Pong, Welcome, encode

KEYS = DeploymentKeys.generate()
SERVER = Incarnation("s1")
MANY = 1000
SILENCE_S = 600.0


class Flood:
    """A socket that always has another message; it ends once the loop has had a turn."""

    def __init__(self, message: object) -> None:
        self._message = message
        self._loop = asyncio.get_running_loop()
        self._num_read = 0
        self.has_turned = asyncio.Event()

    def read(self, **_options: object) -> "asyncio.Future[Any]":
        future: asyncio.Future[Any] = self._loop.create_future()
        if self._num_read == 0:
            self._loop.call_soon(self.has_turned.set)
        if not self.has_turned.is_set():
            self._num_read += 1
            assert self._num_read < MANY, "nothing else runs while messages are taken"
            future.set_result(self._message)
        return future


@pytest.fixture
async def server() -> AsyncIterator[ServerChannel]:
    server = ServerChannel(
        host="127.0.0.1",
        keys=KEYS.of("decode"),
        incarnation=SERVER,
        welcome=lambda _client, _hello: Welcome(WorkerId("decode-0"), SERVER),
        silence_s=SILENCE_S,
    )
    yield server
    server.close()


@pytest.fixture
async def client(server: ServerChannel) -> AsyncIterator[ClientChannel]:
    receiving = asyncio.create_task(server.receive())
    client = ClientChannel(
        server.address,
        keys=KEYS.of("router"),
        server="decode",
        hello=Hello(name="router", incarnation=Incarnation("c1")),
        silence_s=SILENCE_S,
    )
    await client.connect(timeout_s=60)
    receiving.cancel()
    yield client
    client.close()


def ping_of(server: ServerChannel) -> list[zmq.Frame]:
    (client,) = server._clients
    return [zmq.Frame(client), zmq.Frame(encode(Ping()))]


async def take(flood: Flood, receiving: "asyncio.Task[Any]") -> None:
    """Return when the loop has had a turn beside ``receiving``; raises what that raised."""
    turn = asyncio.create_task(flood.has_turned.wait())
    await asyncio.wait({turn, receiving}, return_when=asyncio.FIRST_COMPLETED)
    if receiving.done():
        receiving.result()
    assert turn.done()
    receiving.cancel()


@pytest.mark.usefixtures("client")
async def test_a_client_that_never_pauses_lets_the_loop_go_on(
    server: ServerChannel, monkeypatch: pytest.MonkeyPatch
) -> None:
    flood = Flood(ping_of(server))
    monkeypatch.setattr(server._socket, "recv_multipart", flood.read)
    server._incoming = None
    await take(flood, asyncio.create_task(server.receive()))


async def test_a_server_that_never_pauses_lets_the_loop_go_on(
    client: ClientChannel, monkeypatch: pytest.MonkeyPatch
) -> None:
    connection = client._connection
    assert connection is not None
    flood = Flood(encode(Pong(incarnation=SERVER)))
    monkeypatch.setattr(connection._socket, "recv", flood.read)
    connection._incoming = None
    await take(flood, asyncio.create_task(client.receive()))


@pytest.mark.usefixtures("client")
async def test_a_wait_that_is_given_up_in_that_turn_loses_no_message(
    server: ServerChannel, monkeypatch: pytest.MonkeyPatch
) -> None:
    incoming = server._incoming = asyncio.get_running_loop().create_future()
    incoming.set_result(ping_of(server))
    monkeypatch.setattr(server, "_accept", lambda _frames: ClientLost())
    given_up = asyncio.create_task(server.receive())
    await asyncio.sleep(0)
    given_up.cancel()
    await asyncio.wait({given_up})
    _, message = await server.receive() if given_up.cancelled() else given_up.result()
    assert message == ClientLost()
