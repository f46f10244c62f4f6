"""A worker reports to every address of its routers' name, as that changes."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from core import router_link, router_links
from core.channel import ClientLost, DeploymentKeys, ServerChannel
from core.errors import HandshakeError
from core.ids import WorkerId, new_incarnation
from core.messages import Heartbeat, Refused, Welcome, WorkerLoad
from core.router_link import Reporter, RouterLink
from core.router_links import RouterLinks, addresses_of

KEYS = DeploymentKeys.generate()


@dataclass
class Router:
    """Takes every worker or none, and counts what is reported."""

    refusal: str = ""
    """"": it takes every worker."""
    num_hellos: int = 0
    states: list[str] = field(default_factory=list)
    heard: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        incarnation = new_incarnation()
        self.server = ServerChannel(
            host="127.0.0.1",
            keys=KEYS.of("router"),
            incarnation=incarnation,
            welcome=self._welcome,
        )
        self.incarnation = incarnation
        self.task = asyncio.create_task(self._receive())

    def _welcome(self, *_: object) -> Welcome | Refused:
        self.num_hellos += 1
        if self.refusal:
            return Refused(reason=self.refusal)
        return Welcome(worker_id=WorkerId("router"), incarnation=self.incarnation)

    async def _receive(self) -> None:
        while True:
            _, message = await self.server.receive()
            if not isinstance(message, ClientLost):
                assert isinstance(message, Heartbeat)
                self.states.append(message.state)
                self.heard.set()

    async def close(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        self.server.close()


def reporter(drain: asyncio.Event) -> Reporter:
    incarnation = new_incarnation()

    def heartbeat() -> Heartbeat:
        state = "draining" if drain.is_set() else "ready"
        return Heartbeat(
            WorkerId("decode-0"), "decode", incarnation, "tcp://x", "m", 9, WorkerLoad(), state
        )

    async def answer(_: object) -> None:
        return None

    return Reporter(KEYS.of("decode"), WorkerId("decode-0"), incarnation, drain, heartbeat, answer)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - from outside
            await asyncio.sleep(0.01)


async def test_routers_that_come_are_told_and_a_failing_name_server_cuts_none_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(router_links, "LOOK_UP_INTERVAL_S", 0.05)
    first, second = Router(), Router()
    addresses = {first.server.address}
    fails = False

    async def look_up(_host: str, _port: int) -> frozenset[str]:
        if fails:
            raise OSError("name server is away")
        return frozenset(addresses)

    drain = asyncio.Event()
    links = RouterLinks("tcp://routers:1", reporter(drain), look_up)
    assert not links.is_connected
    running = asyncio.create_task(links.run())
    try:
        await asyncio.wait_for(first.heard.wait(), 60)
        assert links.is_connected
        addresses.add(second.server.address)
        await asyncio.wait_for(second.heard.wait(), 60)

        fails = True
        await asyncio.sleep(0.2)
        addresses.clear()
        fails = False
        await asyncio.sleep(0.2)  # a name without addresses

        # All hear of a drain at once, not with the next second's report.
        drain.set()
        await until(lambda: "draining" in first.states and "draining" in second.states)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await first.close()
        await second.close()


async def test_h09_a_router_that_refuses_leaves_the_worker_to_the_others(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As while routers are replaced by those of another version, one by one."""
    monkeypatch.setattr(router_links, "LOOK_UP_INTERVAL_S", 0.05)
    monkeypatch.setattr(router_links, "REFUSED_WAIT_S", 0.1)
    ours, other = Router(), Router(refusal="protocol version 2 is not 3")

    async def look_up(_host: str, _port: int) -> frozenset[str]:
        return frozenset({ours.server.address, other.server.address})

    links = RouterLinks("tcp://routers:1", reporter(asyncio.Event()), look_up)
    running = asyncio.create_task(links.run())
    try:
        await until(lambda: other.num_hellos >= 3 and len(ours.states) >= 1)
        assert links.is_connected
        assert not running.done()
        refusals = [r for r in caplog.records if "event=refused" in r.getMessage()]
        assert len(refusals) == 1, "told once, however often it is asked again"
        other.refusal = ""  # it is replaced by one that takes the worker
        await asyncio.wait_for(other.heard.wait(), 60)
        # One that is refused by all ends, and says why.
        ours.refusal = other.refusal = "protocol version 2 is not 3"
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    alone = RouterLinks("tcp://routers:1", reporter(asyncio.Event()), look_up)
    with pytest.raises(HandshakeError, match="protocol version 2 is not 3"):
        await asyncio.wait_for(alone.run(), 60)
    await ours.close()
    await other.close()


async def test_a_router_that_is_away_is_told_once_however_often_it_is_looked_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(router_link, "HEARTBEAT_INTERVAL_S", 0.02)
    num_tries = 0

    async def hang_up(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_tries
        num_tries += 1
        writer.close()

    server = await asyncio.start_server(hang_up, "127.0.0.1")
    host, port = server.sockets[0].getsockname()
    link = RouterLink(f"tcp://{host}:{port}", reporter(asyncio.Event()))
    running = asyncio.create_task(link.run())
    try:
        await until(lambda: num_tries >= 4)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        server.close()
        await server.wait_closed()
    assert len([r for r in caplog.records if "event=lost" in r.getMessage()]) == 1


async def test_an_address_that_is_gone_with_its_router_is_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(router_links, "LOOK_UP_INTERVAL_S", 0.05)
    addresses = {"tcp://127.0.0.1:9"}

    async def look_up(_host: str, _port: int) -> frozenset[str]:
        return frozenset(addresses)

    links = RouterLinks("tcp://routers:9", reporter(asyncio.Event()), look_up)
    running = asyncio.create_task(links.run())
    try:
        await until(lambda: len(links._links) == 1)
        addresses.clear()
        await until(lambda: not links._links)
        assert not running.done()
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_a_numeric_address_has_one_address() -> None:
    assert await addresses_of("127.0.0.1", 7) == {"tcp://127.0.0.1:7"}
    assert await addresses_of("::1", 7) == {"tcp://[::1]:7"}
