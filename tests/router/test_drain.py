"""Workers and routers that drain: nobody's client notices."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import httpx
import pytest

from core import lifecycle
from core.config import SluiceConfig
from core.errors import ConfigError
from core.messages import Generate, Role
from tests.router.conftest import MODEL, WAIT_S, RunningRouter, StartRouter
from tests.router.scripted_worker import ScriptedWorker, say

NUM_CLIENTS = 8
LOSSES = ("event=link_lost", "event=worker_silent")


async def refuse(worker: ScriptedWorker, generate: Generate) -> None:
    """Be draining, which the router has not heard yet."""
    worker.fail(generate, "draining")


async def ask(router: RunningRouter) -> httpx.Response:
    body = {"model": MODEL, "prompt": "hello", "max_tokens": 4}
    return await router.http.post("/v1/completions", json=body)


async def connect(router: RunningRouter) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", httpx.URL(router.address.http).port)


async def test_more_draining_workers_than_attempts_are_no_failed_request(
    start_router: StartRouter,
) -> None:
    router = await start_router(max_attempts=1, worker_silence_s=60.0)
    draining = [
        await router.start_worker(refuse, worker_id=f"decode-{index}", heartbeat_interval_s=30.0)
        for index in range(3)
    ]
    await router.start_worker(say([20, 21]), worker_id="decode-3")
    answer = await ask(router)
    assert answer.status_code == 200, answer.text
    assert sum(len(worker.generates) for worker in draining) == 3
    answer = await ask(router)
    assert answer.status_code == 200, answer.text


async def test_a_worker_that_drains_for_ever_and_reports_ready_is_not_asked_for_ever(
    start_router: StartRouter,
) -> None:
    router = await start_router(max_attempts=2, admission_wait_s=30.0)
    worker = await router.start_worker(refuse, heartbeat_interval_s=0.02)
    answer = await ask(router)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "overloaded")
    assert len(worker.generates) == 3  # a refusal that nobody could foresee, and two attempts


async def test_a_refusal_takes_a_worker_out_before_its_next_heartbeat(
    start_router: StartRouter,
) -> None:
    router = await start_router(worker_silence_s=30.0)
    worker = await router.start_worker(refuse, worker_id="decode-0", heartbeat_interval_s=20.0)
    await router.start_worker(say([20, 21]), worker_id="decode-1", heartbeat_interval_s=20.0)
    for _ in range(3):
        assert (await ask(router)).status_code == 200
    assert len(worker.generates) == 1
    await router.until_state("decode-0", "draining")


@pytest.mark.parametrize("state", ["ready", "draining"])
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_only_the_loss_of_a_worker_that_has_not_drained_is_a_warning(
    start_router: StartRouter, caplog: pytest.LogCaptureFixture, role: Role, state: str
) -> None:
    router = await start_router(worker_silence_s=1.0)
    worker = await router.start_worker(
        say([20]), worker_id="other", role=role, heartbeat_interval_s=0.02
    )
    worker.state = state
    await router.until_state("other", state)
    with caplog.at_level(logging.INFO, logger="router.fleet"):
        await worker.die()
        await router.until_state("other", None)
    losses = [r for r in caplog.records if r.getMessage().startswith(LOSSES)]
    # Twice where its last report came after the end of its link was seen
    assert {r.levelname for r in losses} == {"WARNING" if state == "ready" else "INFO"}


@asynccontextmanager
async def being_answered(router: RunningRouter) -> AsyncIterator[asyncio.Task[httpx.Response]]:
    """Keep a request pending, so that a router that drains stays; it ends well after all."""
    go_on = asyncio.Event()

    async def wait(worker: ScriptedWorker, generate: Generate) -> None:
        await go_on.wait()
        await say([20, 21])(worker, generate)

    worker = await router.start_worker(wait)
    pending = asyncio.create_task(ask(router))
    await worker.wait_for(lambda: len(worker.generates) == 1)
    yield pending
    go_on.set()
    assert (await pending).status_code == 200


async def test_a_draining_router_finishes_what_is_pending_refuses_the_rest_and_ends(
    start_router: StartRouter,
) -> None:
    router = await start_router()
    async with being_answered(router):
        assert (await router.http.get("/readyz")).status_code == 200
        router.lifecycle.drain.set()
        async with asyncio.timeout(WAIT_S):
            while (await router.http.get("/readyz")).status_code != 503:  # noqa: ASYNC110 - from outside
                await asyncio.sleep(0.01)
        assert (await router.http.get("/livez")).status_code == 200
        refused = await ask(router)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
    await asyncio.wait_for(router.serving, WAIT_S)


@dataclass
class Balancer:
    """Sends each new connection to ``target``; one that is open stays where it is."""

    target: int
    port: int = 0
    _joined: list[asyncio.Task[None]] = field(default_factory=list)

    @asynccontextmanager
    async def running(self) -> AsyncIterator["Balancer"]:
        async with await asyncio.start_server(self._join, "127.0.0.1", 0) as server:
            self.port = server.sockets[0].getsockname()[1]
            yield self
            for each in self._joined:
                each.cancel()

    async def _join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ahead, back = await asyncio.open_connection("127.0.0.1", self.target)
        for copying in (self._copy(reader, back), self._copy(ahead, writer)):
            self._joined.append(asyncio.create_task(copying))

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while content := await reader.read(2**16):
            writer.write(content)
        writer.close()


async def answer_after_a_while(worker: ScriptedWorker, generate: Generate) -> None:
    await asyncio.sleep(0.03)
    await say([20, 21])(worker, generate)


@dataclass
class Clients:
    """Ask for as long as they are not done; each over one connection for as long as it is kept."""

    url: str
    done: asyncio.Event = field(default_factory=asyncio.Event)
    statuses: list[int] = field(default_factory=list[int])
    """Of all answers, in their order."""

    async def ask(self, *, pause_s: float) -> None:
        """Be one of them."""
        body = {"model": MODEL, "prompt": "hello", "max_tokens": 4, "stream": True}
        async with httpx.AsyncClient(base_url=self.url, timeout=WAIT_S) as client:
            while not self.done.is_set():
                answer = await client.post("/v1/completions", json=body)
                self.statuses.append(answer.status_code)
                await asyncio.sleep(pause_s)

    async def until_more(self, count: int) -> None:
        """Wait for ``count`` more answers."""
        wanted = len(self.statuses) + count
        async with asyncio.timeout(WAIT_S):
            while len(self.statuses) < wanted:  # noqa: ASYNC110 - seen from outside
                await asyncio.sleep(0.01)


async def test_a_rolling_restart_of_routers_loses_no_request_though_the_news_is_late(
    start_router: StartRouter,
) -> None:
    old, new = await start_router(drain_delay_s=3.0), await start_router()
    for router in (old, new):
        await router.start_worker(answer_after_a_while)
    ports = [httpx.URL(router.address.http).port or 0 for router in (old, new)]
    async with Balancer(ports[0]).running() as balancer:
        clients = Clients(f"http://127.0.0.1:{balancer.port}")
        asking = [
            asyncio.create_task(clients.ask(pause_s=0.02 * number)) for number in range(NUM_CLIENTS)
        ]
        await clients.until_more(NUM_CLIENTS)
        old.lifecycle.drain.set()
        await clients.until_more(NUM_CLIENTS)
        assert (await old.http.get("/readyz")).json()["status"] == "draining"
        balancer.target = ports[1]
        await asyncio.wait_for(old.serving, WAIT_S)
        await clients.until_more(NUM_CLIENTS)
        clients.done.set()
        await asyncio.gather(*asking)
    assert set(clients.statuses) == {200}


async def test_an_idle_router_goes_on_for_the_whole_delay(
    start_router: StartRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lifecycle, "DRAIN_NOTICE_S", 0.1)
    router = await start_router(drain_delay_s=3.0)
    await router.start_worker(say([20, 21]))
    router.lifecycle.drain.set()
    await asyncio.sleep(0.5)  # longer than an idle service stays
    answer = await ask(router)
    assert (answer.status_code, answer.headers["connection"]) == (200, "close")
    await asyncio.wait_for(router.serving, WAIT_S)


async def test_a_stream_that_outlasts_the_delay_ends_its_connection(
    start_router: StartRouter,
) -> None:
    """It began before the drain, with the promise to keep it; a client would use it once more."""
    router = await start_router(drain_delay_s=0.1)
    go_on = [asyncio.Event(), asyncio.Event()]

    async def wait(worker: ScriptedWorker, generate: Generate) -> None:
        turn = go_on[len(worker.generates) - 1]
        worker.output(generate, (20,))
        await turn.wait()
        worker.output(generate, (21,), finish="stop")

    worker = await router.start_worker(wait)
    body = json.dumps({"model": MODEL, "prompt": "hello", "max_tokens": 4, "stream": True})
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
    answer, sink = await connect(router)
    sink.write(f"{head}{body}".encode())
    async with asyncio.timeout(WAIT_S):
        assert b"connection: close" not in await answer.readuntil(b"\r\n\r\n")
        longer = asyncio.create_task(ask(router))
        await worker.wait_for(lambda: len(worker.generates) == 2)
        router.lifecycle.drain.set()
        await asyncio.sleep(0.5)
        assert (await ask(router)).status_code == 503
        go_on[0].set()
        assert (await answer.read()).endswith(b"0\r\n\r\n")
        assert not router.serving.done()
    go_on[1].set()
    assert (await longer).status_code == 200
    sink.close()
    await asyncio.wait_for(router.serving, WAIT_S)


@pytest.mark.parametrize("sent", ["before_the_drain", "after_the_delay"])
@pytest.mark.parametrize("delay_s", [0.0, 0.1])
async def test_a_pipelined_request_is_answered_though_its_router_has_left_meanwhile(
    start_router: StartRouter, delay_s: float, sent: str
) -> None:
    """The answer before it has promised to keep the connection, and was the last one when read."""
    router = await start_router(drain_delay_s=delay_s)
    go_on = asyncio.Event()

    async def wait(worker: ScriptedWorker, generate: Generate) -> None:
        worker.output(generate, (20,))
        await go_on.wait()
        worker.output(generate, (21,), finish="stop")

    worker = await router.start_worker(wait)
    body = json.dumps({"model": MODEL, "prompt": "hello", "max_tokens": 4, "stream": True})
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
    asked = f"{head}{body}".encode()
    answer, sink = await connect(router)
    sink.write(asked * 2 if sent == "before_the_drain" else asked)
    async with asyncio.timeout(WAIT_S):
        assert b"connection: close" not in await answer.readuntil(b"\r\n\r\n")
        router.lifecycle.drain.set()
        await asyncio.sleep(0.5)
        if sent == "after_the_delay":
            sink.write(asked)
        assert (await ask(router)).status_code == 503
        go_on.set()
        assert (await answer.readuntil(b"0\r\n\r\n")).endswith(b"[DONE]\n\n\r\n0\r\n\r\n")
        head, _, refusal = (await answer.read()).decode().partition("\r\n\r\n")
    assert " 503 " in head
    assert "connection: close" in head
    assert json.loads(refusal)["error"]["code"] == "shutting_down"
    assert len(worker.generates) == 1
    sink.close()
    await asyncio.wait_for(router.serving, WAIT_S)


async def test_what_is_pipelined_behind_the_promised_end_is_not_begun(
    start_router: StartRouter,
) -> None:
    """Who asks amid the delay is told that the connection ends; RFC 9112, 9.6: ask anew."""
    router = await start_router(drain_delay_s=3.0)
    worker = await router.start_worker(say([20, 21]))
    router.lifecycle.drain.set()
    body = json.dumps({"model": MODEL, "prompt": "hello", "max_tokens": 4})
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
    reader, writer = await connect(router)
    await asyncio.sleep(0.1)
    writer.write(f"{head}{body}".encode() * 2)
    async with asyncio.timeout(WAIT_S):
        head, _, answer = (await reader.read()).decode().partition("\r\n\r\n")
    assert " 200 OK" in head
    assert "connection: close" in head
    assert json.loads(answer)["choices"]
    writer.close()
    await asyncio.wait_for(router.serving, WAIT_S)
    assert len(worker.generates) == 1


async def test_without_a_delay_the_next_request_of_a_kept_connection_is_refused_not_cut(
    start_router: StartRouter,
) -> None:
    router = await start_router(drain_delay_s=0.0)
    async with being_answered(router):
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", httpx.URL(router.address.http).port
        )
        asked = b"GET /readyz HTTP/1.1\r\nhost: x\r\n\r\n"
        async with asyncio.timeout(WAIT_S):
            writer.write(asked)
            assert b"200 OK" in await reader.readuntil(b"}")
            router.lifecycle.drain.set()
            await asyncio.sleep(0.2)
            writer.write(asked)
            answer = await reader.read()
        assert b" 503 " in answer
        assert b"connection: close" in answer
        writer.close()
    await asyncio.wait_for(router.serving, WAIT_S)


async def test_a_kept_connection_that_asks_nothing_amid_the_delay_ends_with_it(
    start_router: StartRouter,
) -> None:
    """It is kept for longer than a drain takes: its next request would meet a refusal."""
    router = await start_router(drain_delay_s=0.3)
    async with being_answered(router) as pending:
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", httpx.URL(router.address.http).port
        )
        writer.write(b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\n")
        assert b"200 OK" in await reader.readuntil(b"}")
        router.lifecycle.drain.set()
        async with asyncio.timeout(WAIT_S):
            assert await reader.read() == b""
        assert not pending.done()
        writer.close()
    await asyncio.wait_for(router.serving, WAIT_S)


@pytest.mark.parametrize("begun", [b"", b"GET /readyz HTTP/1.1\r\n"], ids=["fresh", "half-a-head"])
async def test_a_request_that_is_on_its_way_when_the_delay_ends_is_refused_not_cut(
    start_router: StartRouter, begun: bytes
) -> None:
    """Many a client asks no second time on a connection that it has only just made."""
    router = await start_router(drain_delay_s=0.2)
    async with being_answered(router):
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", httpx.URL(router.address.http).port
        )
        writer.write(begun)
        router.lifecycle.drain.set()
        await asyncio.sleep(0.5)
        writer.write(b"GET /readyz HTTP/1.1\r\nhost: x\r\n\r\n".removeprefix(begun))
        async with asyncio.timeout(WAIT_S):
            answer = await reader.read()
        assert b" 503 " in answer
        assert b"connection: close" in answer
        writer.close()
    await asyncio.wait_for(router.serving, WAIT_S)


def test_a_delay_as_long_as_the_drain_is_refused() -> None:
    content = {"router": {"drain_delay_s": 60.0}, "deploy": {"drain_timeout_s": 60.0}}
    with pytest.raises(
        ConfigError, match=r"router\.drain_delay_s: 60\.0 .*deploy\.drain_timeout_s"
    ):
        SluiceConfig.parse(content, source="test")
