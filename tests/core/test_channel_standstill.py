"""A server that stood still itself takes none of its clients for silent.

What they sent meanwhile lies unread, and a client of this machine stood still with it. Whoever
waits for a loss here gives up all requests of a router, or of a reader, for nothing.
"""

import asyncio
import time

from core.channel import ClientChannel, ClientId, ClientLost, DeploymentKeys, ServerChannel
from core.ids import Attempt, Incarnation, RequestId, WorkerId
from core.messages import Abort, Hello, Welcome

KEYS = DeploymentKeys.generate()
LIFE = Incarnation("s1")
SILENCE_S = 0.6


def take_all(_client: ClientId, _hello: Hello) -> Welcome:
    return Welcome(worker_id=WorkerId("decode-0"), incarnation=LIFE)


async def test_a_server_that_stood_still_gives_none_of_its_clients_up() -> None:
    server = ServerChannel(
        host="127.0.0.1",
        keys=KEYS.of("decode"),
        incarnation=LIFE,
        welcome=take_all,
        silence_s=SILENCE_S,
    )
    events: list[object] = []
    lost = asyncio.Event()

    async def collect() -> None:
        while True:
            events.append((await server.receive())[1])
            if ClientLost() in events:
                lost.set()

    collecting = asyncio.create_task(collect())
    clients = [
        ClientChannel(
            server.address,
            keys=KEYS.of("router"),
            server="decode",
            hello=Hello(name="router", incarnation=Incarnation(f"c{number}")),
            silence_s=SILENCE_S,
        )
        for number in range(3)
    ]
    try:
        for client in clients:
            await client.connect()
        # When nothing runs here for longer than a client may be silent, again and again
        for number in range(3):
            clients[number].send(Abort(RequestId("r"), Attempt(1)))
            await asyncio.sleep(SILENCE_S / 3)
            time.sleep(2 * SILENCE_S)  # noqa: ASYNC251 - the adversary
        await asyncio.sleep(SILENCE_S / 2)
        # Then nobody is lost
        assert server.num_clients == len(clients)
        assert ClientLost() not in events
        # Until somebody is
        clients.pop().close()
        await asyncio.wait_for(lost.wait(), 20)
        assert server.num_clients == len(clients)
    finally:
        for client in clients:
            client.close()
        collecting.cancel()
        server.close()
