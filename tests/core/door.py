"""A server that admits by key and tells what got in, and clients that knock at it."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from core.channel import ChannelKeys, ClientChannel, ClientId, ServerChannel
from core.ids import Attempt, Incarnation, RequestId, WorkerId
from core.messages import Abort, Hello, Party, PoolEndpoint, Welcome

ABORT = Abort(RequestId("r"), Attempt(1))
POOL = PoolEndpoint(transport="ucx", metadata=b"where", base_address=4096, nbytes=4096)


class Clock:
    """Time that passes only where a test says so, however long its turns take."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def stop_clock(server: ServerChannel) -> Clock:
    """Return the clock by which clients of ``server`` are silent from now on."""
    clock = server._clock = Clock()
    return clock


@dataclass
class Door:
    """A server that tells what got in."""

    server: ServerChannel
    hellos: list[Hello] = field(default_factory=list[Hello])
    events: list[tuple[ClientId, object]] = field(default_factory=list[tuple[ClientId, object]])

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(60):
            while True:
                if condition():
                    return
                await asyncio.sleep(0.01)


@asynccontextmanager
async def open_door(keys: ChannelKeys, *, silence_s: float = 60.0) -> AsyncIterator[Door]:
    """Serve; a busy machine makes none of the clients silent for as long as ``silence_s``."""

    def welcome(_client: ClientId, hello: Hello) -> Welcome:
        door.hellos.append(hello)
        return Welcome(WorkerId("W"), Incarnation("s"), pools=(POOL,))

    async def serve() -> None:
        while True:
            door.events.append(await server.receive())

    server = ServerChannel(
        host="127.0.0.1",
        keys=keys,
        incarnation=Incarnation("s"),
        welcome=welcome,
        silence_s=silence_s,
    )
    door = Door(server)
    serving = asyncio.create_task(serve())
    yield door
    serving.cancel()
    server.close()


def channel(door: Door, keys: ChannelKeys, server: Party, name: str = "c") -> ClientChannel:
    hello = Hello(name=name, incarnation=Incarnation(f"of-{name}"))
    return ClientChannel(door.server.address, keys=keys, server=server, hello=hello)
