"""A peer that dies, restarts, lies about its version or holds the wrong keys must be noticed.

Otherwise requests wait for ever on a channel that nobody answers, or a stranger drives a worker.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from core.channel import (
    ChannelKeys,
    ClientChannel,
    ClientId,
    ClientLost,
    DeploymentKeys,
    ServerChannel,
)
from core.channel_keys import KeyPair
from core.errors import ConfigError, HandshakeError, PeerLostError
from core.ids import Attempt, Incarnation, RequestId, WorkerId
from core.messages import Abort, Hello, Refused, Welcome
from tests.core.door import stop_clock

KEYS = DeploymentKeys.generate()
ROUTER, DECODE = KEYS.of("router"), KEYS.of("decode")
HELLO = Hello(name="router", incarnation=Incarnation("c1"))
ABORT = Abort(RequestId("r"), Attempt(1))


def take_all(_client: ClientId, _hello: Hello) -> Welcome | Refused:
    return Welcome(worker_id=WorkerId("decode-0"), incarnation=Incarnation("s1"))


def to(server: ServerChannel, *, silence_s: float = 5.0) -> ClientChannel:
    """Return a router's channel to ``server``."""
    return ClientChannel(
        server.address, keys=ROUTER, server="decode", hello=HELLO, silence_s=silence_s
    )


@asynccontextmanager
async def open_server(**options: object) -> AsyncIterator[ServerChannel]:
    server = ServerChannel(
        host="127.0.0.1",
        keys=DECODE,
        **({"welcome": take_all, "incarnation": Incarnation("s1")} | options),  # type: ignore[arg-type]
    )
    try:
        yield server
    finally:
        server.close()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - of what is inside, nothing tells
            await asyncio.sleep(0.001)


async def test_messages_cross_in_both_directions() -> None:
    async with open_server() as server:
        receiving = asyncio.create_task(server.receive())
        client = to(server)
        welcome = await client.connect()
        assert welcome.worker_id == "decode-0"
        client.send(ABORT)
        sender, message = await receiving
        assert message == ABORT
        server.send(sender, ABORT)
        assert await client.receive() == ABORT
        client.close()


async def test_silent_client_is_reported_once() -> None:
    async with open_server(silence_s=0.4) as server:
        clock = stop_clock(server)
        receiving = asyncio.create_task(server.receive())
        client = to(server, silence_s=0.4)
        await client.connect()
        (known,) = server._clients.values()
        for _ in range(7):  # pings keep it alive beyond the bound
            clock.now += 0.09
            await until(lambda: known.last_seen == clock.now)
            assert not receiving.done()
        client.close()
        while not receiving.done():
            clock.now += 0.09  # in steps: after a leap it would take itself for what stood still
            await asyncio.sleep(0.1)
        assert receiving.result()[1] == ClientLost()


async def test_closed_server_is_lost_at_once() -> None:
    async with open_server() as server:
        receiving = asyncio.create_task(server.receive())
        client = to(server, silence_s=60)
        await client.connect()
        receiving.cancel()
        server.close()
        with pytest.raises(PeerLostError, match="connection closed"):
            await client.receive()
        client.close()


async def test_frozen_server_is_lost_after_the_bound() -> None:
    async with open_server() as server:
        receiving = asyncio.create_task(server.receive())
        client = to(server, silence_s=0.4)
        await client.connect()
        receiving.cancel()  # nobody answers pings any more
        with pytest.raises(PeerLostError, match="silent"):
            await client.receive()
        client.close()


async def test_other_protocol_version_is_refused_with_the_fix() -> None:
    async with open_server() as server:
        receiving = asyncio.create_task(server.receive())
        hello = Hello(name="router", incarnation=Incarnation("c1"), protocol_version=0)
        client = ClientChannel(server.address, keys=ROUTER, server="decode", hello=hello)
        with pytest.raises(HandshakeError, match="run one Sluice version"):
            await client.connect()
        receiving.cancel()


async def test_client_without_the_deployments_key_gets_nothing() -> None:
    async with open_server() as server:
        receiving = asyncio.create_task(server.receive())
        stranger = ChannelKeys("router", KeyPair.generate(), ROUTER.public)
        client = ClientChannel(server.address, keys=stranger, server="decode", hello=HELLO)
        with pytest.raises(PeerLostError, match="does not accept our keys"):
            await client.connect(timeout_s=60)
        assert server.rejects.counts["key"] == 1
        receiving.cancel()


async def test_nothing_listening_is_lost_within_the_timeout() -> None:
    client = ClientChannel("tcp://127.0.0.1:9", keys=ROUTER, server="decode", hello=HELLO)
    with pytest.raises(PeerLostError):
        await client.connect(timeout_s=2)


async def test_busy_port_is_one_clear_error() -> None:
    async with open_server() as server:
        port = int(server.address.rsplit(":", 1)[1])
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}"):
            ServerChannel(
                host="127.0.0.1",
                port=port,
                keys=DECODE,
                incarnation=Incarnation("s2"),
                welcome=take_all,
            )


async def test_message_before_hello_is_refused_and_not_delivered() -> None:
    async with open_server() as server:
        receiving = asyncio.create_task(server.receive())
        client = to(server)
        client._hello = ABORT  # type: ignore[assignment]
        answer = await client._say_hello()
        assert isinstance(answer, Refused)
        assert "starts with Hello" in answer.reason
        assert server.num_dropped == 1
        receiving.cancel()
        client.close()


async def test_no_message_is_lost_when_it_meets_the_look_for_silent_clients() -> None:
    """A receive that is cancelled by its own timer can drop the message that came with it."""
    async with open_server(silence_s=0.2) as server:
        stop_clock(server)  # it looks, and nobody is silent
        client = to(server, silence_s=60)
        receiving = asyncio.create_task(server.receive())
        await client.connect()
        names = [str(number) for number in range(60)]
        seen: list[object] = []

        async def collect() -> None:
            seen.append((await receiving)[1])
            while len(seen) < len(names):
                seen.append((await server.receive())[1])

        collecting = asyncio.create_task(collect())
        for name in names:
            client.send(Abort(RequestId(name), Attempt(1)))
            await asyncio.sleep(0.05)  # just when the server's wait of silence_s / 4 ends
        await asyncio.wait_for(collecting, 60)
        assert seen == [Abort(RequestId(name), Attempt(1)) for name in names]
        client.close()


async def test_what_came_while_the_loop_was_busy_counts_as_heard() -> None:
    async with open_server(silence_s=0.4) as server:
        clock = stop_clock(server)
        receiving = asyncio.create_task(server.receive())
        client = to(server, silence_s=60)
        await client.connect()
        client.send(ABORT)
        assert (await receiving)[1] == ABORT
        client.send(ABORT)
        client.send(ABORT)
        assert await server._socket.poll(60_000)
        clock.now += 0.6  # nobody receives for longer than the bound
        assert [(await server.receive())[1] for _ in range(2)] == [ABORT, ABORT]
        client.close()


async def test_silent_client_is_found_among_talkative_ones() -> None:
    async with open_server(silence_s=0.4) as server:
        clock = stop_clock(server)
        events: list[object] = []

        async def collect() -> None:
            while True:
                events.append((await server.receive())[1])

        collecting = asyncio.create_task(collect())
        silent = to(server)
        await silent.connect()
        silent.close()
        talkative = to(server, silence_s=60)
        await talkative.connect()
        while events.count(ABORT) < 40:
            before = len(events)
            talkative.send(ABORT)
            await until(lambda: ABORT in events[before:])  # noqa: B023 - awaited here
            clock.now += 0.1
        assert events.count(ClientLost()) == 1
        collecting.cancel()
        talkative.close()


async def test_own_stall_is_not_taken_for_the_servers_silence() -> None:
    """A loop that stood still finds its pongs unread; they must count before anything is lost."""
    async with open_server(silence_s=60) as server:
        serving = asyncio.create_task(server.receive())
        client = to(server, silence_s=0.4)
        await client.connect()
        receiving = asyncio.create_task(client.receive())
        await asyncio.sleep(0.1)
        time.sleep(0.8)  # noqa: ASYNC251 - the stall
        await asyncio.sleep(0.3)
        assert not receiving.done()
        receiving.cancel()
        serving.cancel()
        client.close()


async def test_address_that_is_none_is_a_lost_peer() -> None:
    client = ClientChannel("nonsense", keys=ROUTER, server="decode", hello=HELLO)
    with pytest.raises(PeerLostError, match="nonsense"):
        await client.connect()


async def test_closing_a_channel_tells_its_receiver_that_the_peer_is_lost() -> None:
    """A receiver that is cancelled instead would never report the loss: its requests would hang."""
    async with open_server() as server:
        serving = asyncio.create_task(server.receive())
        client = to(server)
        await client.connect()
        receiving = asyncio.create_task(client.receive())
        await asyncio.sleep(0.05)
        client.close()
        with pytest.raises(PeerLostError, match="channel closed"):
            await receiving
        serving.cancel()


async def test_h04_d15_server_restarted_at_the_same_address_is_another_life() -> None:
    """What was meant for the old life must not reach the new one, which has another pool."""

    def new_life(_client: ClientId, _hello: Hello) -> Welcome | Refused:
        return Welcome(worker_id=WorkerId("decode-0"), incarnation=Incarnation("s2"))

    async with open_server() as server:
        serving = asyncio.create_task(server.receive())
        port = int(server.address.rsplit(":", 1)[1])
        old = to(server)
        await old.connect()
        serving.cancel()
    await asyncio.sleep(0.05)  # the old life's descriptors are given up a turn later
    async with open_server(port=port, welcome=new_life, incarnation=Incarnation("s2")) as server:
        serving = asyncio.create_task(server.receive())
        old.send(ABORT)
        with pytest.raises(PeerLostError, match="connection closed"):
            await old.receive()
        old.close()
        new = to(server)
        assert (await new.connect()).incarnation == "s2"
        assert not serving.done()
        serving.cancel()
        new.close()
