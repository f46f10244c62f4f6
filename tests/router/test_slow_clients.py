"""A client that asks for a stream, stays connected, and does not read it.

The server's buffer for it fills, and a write waits until it reads on. Without a bound it holds its
place among ``router.max_pending_requests``, its blocks on decode, and a drain, for as long as it
likes.
"""

import asyncio
import json
import socket
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from core.messages import Generate
from tests.router.conftest import MODEL, RunningRouter, StartRouter
from tests.router.model_folder import EOS
from tests.router.scripted_worker import ScriptedWorker, say

BODY = {"model": MODEL, "prompt": "a", "max_tokens": 100}


async def flood(worker: ScriptedWorker, generate: Generate) -> None:
    """Give more than any socket holds, until the router has enough."""
    while not any(abort.request_id == generate.request_id for abort in worker.aborts):
        worker.output(generate, (20,) * 500)
        await asyncio.sleep(0.001)


@asynccontextmanager
async def client_that_does_not_read(router: RunningRouter) -> AsyncGenerator[socket.socket]:
    """Ask for a stream over a real connection, and leave what comes in the socket."""
    host, _, port = router.address.http.removeprefix("http://").rpartition(":")
    body = json.dumps(BODY | {"stream": True}).encode()
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.setblocking(False)  # noqa: FBT003 - the standard library's
        loop = asyncio.get_running_loop()
        await loop.sock_connect(client, (host, int(port)))
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
        await loop.sock_sendall(client, head.encode() + body)
        yield client


async def test_a_client_that_does_not_read_is_aborted_and_frees_its_place(
    start_router: StartRouter,
) -> None:
    router = await start_router(write_timeout_s=0.3, max_pending_requests=1)
    worker = await router.start_worker(flood)
    async with client_that_does_not_read(router):
        # The client stays, and decode is told to stop
        await worker.wait_for(lambda: len(worker.aborts) == 1)
        await router.until_idle()
        assert await router.metric('sluice_cancellations_total{cause="client",') == 1
        assert await router.metric('sluice_requests_total{code="499"') == 1

        # Its place is another's
        worker.script = say([20, EOS])
        assert (await router.http.post("/v1/completions", json=BODY)).status_code == 200


async def test_a_client_that_does_not_read_does_not_hold_a_drain(
    start_router: StartRouter,
) -> None:
    router = await start_router(write_timeout_s=0.3)
    worker = await router.start_worker(flood)
    async with client_that_does_not_read(router):
        await worker.wait_for(lambda: len(worker.generates) == 1)
        router.lifecycle.drain.set()
        async with asyncio.timeout(20):
            await router.serving


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="the system has no bound")
async def test_the_connection_of_a_client_that_does_not_read_ends(
    start_router: StartRouter,
) -> None:
    router = await start_router(write_timeout_s=0.3)
    worker = await router.start_worker(flood)
    async with client_that_does_not_read(router) as client:
        assert is_held(client)
        await worker.wait_for(lambda: len(worker.aborts) == 1)
        async with asyncio.timeout(20):
            while is_held(client):  # noqa: ASYNC110 - the kernel tells nobody
                await asyncio.sleep(0.05)


def is_held(client: socket.socket) -> bool:
    """Return whether the other side of the connection exists (``/proc/net/tcp``, in hex)."""
    ports = [client.getpeername()[1], client.getsockname()[1]]
    rows = [line.split()[1:3] for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return ports in [[int(end.partition(":")[2], 16) for end in row] for row in rows]


async def test_a_pause_of_decode_is_no_pause_of_the_client(start_router: StartRouter) -> None:
    router = await start_router(write_timeout_s=0.3)

    async def pauses(worker: ScriptedWorker, generate: Generate) -> None:
        worker.output(generate, (20,))
        await asyncio.sleep(0.5)  # longer than a write may take: the wait is decode's, not a write
        worker.output(generate, (EOS,), finish="stop")

    await router.start_worker(pauses)
    answer = await router.http.post("/v1/completions", json=BODY | {"stream": True})
    assert answer.text.endswith("data: [DONE]\n\n")
