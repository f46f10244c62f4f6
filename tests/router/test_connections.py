"""What a client can cost before it has said what it wants, and how its leaving is noticed.

The failures guarded against: memory that grows by headers which never end, before any key is asked
for; connections that say nothing and stay; a request that is generated to its end for a client that
left, since it had sent its next one already.
"""

import asyncio
import json
import logging

import pytest

from core.messages import Generate
from router import connections
from router import strangers as strangers_room
from router.strangers import Strangers
from tests.router.conftest import MODEL, WAIT_S, RunningRouter
from tests.router.model_folder import EOS
from tests.router.raw_connections import SendInPieces, answer_of, connected
from tests.router.scripted_worker import ScriptedWorker, say

BODY = json.dumps({"model": MODEL, "prompt": "a", "max_tokens": 100}).encode()
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n" % len(BODY)
ASKED = HEAD + b"\r\n" + BODY


async def test_headers_that_do_not_end_are_refused_before_they_fill_the_memory(
    router: RunningRouter,
) -> None:
    async with connected(router) as (reader, writer):
        writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\nx-long: ")
        with pytest.raises(ConnectionError):  # noqa: PT012 - whenever the end is met
            for _ in range(10_000):
                writer.write(b"a" * 10_000)
                await writer.drain()
                await asyncio.sleep(0)
        del reader
    async with connected(router) as (reader, writer):
        writer.write(b"GET /health HTTP/1.1\r\n")
        for number in range(2):  # two pieces, so that nothing is on the way when the end comes
            await asyncio.sleep(0.05)
            writer.write(b"x-%d: " % number + b"a" * 40_000)
        assert (await answer_of(reader))[0] == 431
    assert (await router.http.get("/health")).status_code == 200


async def test_a_long_body_is_no_long_head(router: RunningRouter) -> None:
    await router.start_worker(say([20, EOS]))
    prompts = ["a" * 30] * 200
    body = {"model": MODEL, "prompt": prompts, "user": "u" * 300_000, "max_tokens": 2}
    answer = await router.http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text


async def test_who_says_nothing_or_not_enough_is_not_waited_for(
    router: RunningRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "HEAD_TIMEOUT_S", 0.3)
    async with connected(router) as (reader, _):
        async with asyncio.timeout(WAIT_S):
            assert await reader.read(-1) == b""
    async with connected(router) as (reader, writer):
        writer.write(HEAD)
        status, error = await answer_of(reader)
        assert (status, error["type"]) == (408, "invalid_request_error")


async def test_an_answer_takes_longer_than_a_head_may_and_so_does_a_pause_after_it(
    router: RunningRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "HEAD_TIMEOUT_S", 0.2)

    async def late(worker: ScriptedWorker, generate: Generate) -> None:
        await asyncio.sleep(0.6)
        await say([20, EOS])(worker, generate)

    await router.start_worker(late)
    async with connected(router) as (reader, writer):
        writer.write(ASKED + b"GET /he")  # the next one has begun
        async with asyncio.timeout(WAIT_S):
            assert b" 200 OK" in await reader.readuntil(b"\r\n\r\n")
            await reader.readuntil(b"}}}")
        writer.write(b"alth HTTP/1.1\r\nhost: x\r\n\r\n")
        async with asyncio.timeout(WAIT_S):
            assert b" 200 OK" in await reader.readuntil(b"\r\n\r\n")
            await reader.readuntil(b"}")
        await asyncio.sleep(0.6)
        writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        async with asyncio.timeout(WAIT_S):
            assert b" 200 OK" in await reader.readuntil(b"\r\n\r\n")


async def test_a_client_that_leaves_with_its_next_request_sent_ends_the_one_that_runs(
    router: RunningRouter,
) -> None:
    async def one_token(worker: ScriptedWorker, generate: Generate) -> None:
        worker.output(generate, (20,))

    worker = await router.start_worker(one_token)
    async with connected(router) as (_, writer):
        writer.write(ASKED * 3)
        await worker.wait_for(lambda: len(worker.generates) == 1)
    await worker.wait_for(lambda: len(worker.aborts) == 1)
    await router.until_idle()
    assert len(worker.generates) == 1


@pytest.mark.parametrize(
    "content",
    [
        b"\x16\x03\x01\x02\x00\x01",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        HEAD + b"content-length: 3\r\n\r\n" + BODY,
        HEAD + b"transfer-encoding: chunked\r\n\r\n" + BODY,
        HEAD.replace(b"content-length", b"content-length: -5\r\nx") + b"\r\n",
        b"POST /v1/completions HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\nZZ\r\nabc",
    ],
)
async def test_what_is_no_http_is_told_so_in_the_form_of_all_errors(
    router: RunningRouter, content: bytes
) -> None:
    async with connected(router) as (reader, writer):
        writer.write(content)
        status, error = await answer_of(reader)
    assert (status, error["type"]) == (400, "invalid_request_error")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"\x16\x03\x01\x02\x00\x01", "it is TLS: speak http, or put TLS in front"),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", "it is HTTP/2: speak HTTP/1.1"),
        (b"SSH-2.0-OpenSSH_9.2\r\n", "Invalid method encountered"),
        (b"GET / HTTP/1.1\r\nhost: x\r\n\r\n\x16\x03\x01", "Invalid method encountered"),
        (b"CONNECT x:80 HTTP/1.1\r\nhost: x:80\r\n\r\n", "it is meant for a proxy"),
        (b"GET x:80 HTTP/1.1\r\nhost: x:80\r\n\r\n", "Unexpected char in url schema"),
        (b"OPTIONS http://x:port HTTP/1.1\r\n\r\n", "the target of the request cannot be read"),
    ],
)
async def test_the_log_tells_who_sent_what_is_no_http_and_what_it_was_once(
    router: RunningRouter, caplog: pytest.LogCaptureFixture, content: bytes, reason: str
) -> None:
    for _ in range(3):
        async with connected(router) as (reader, writer):
            writer.write(content)
            async with asyncio.timeout(WAIT_S):
                answer = await reader.read(-1)
        assert reason in json.loads(answer.rpartition(b"\r\n\r\n")[2])["error"]["message"]
    (told,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert "event=not_http peer=127.0.0.1:" in told.getMessage()
    assert reason in told.getMessage()


async def test_http_2_is_told_so_wherever_its_beginning_is_cut(
    router: RunningRouter, send_in_pieces: SendInPieces
) -> None:
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    for cut in range(1, len(preface)):
        async with connected(router) as (reader, writer):
            await send_in_pieces(writer, preface[:cut], preface[cut:])
            status, error = await answer_of(reader)
        assert status == 400
        assert "it is HTTP/2: speak HTTP/1.1" in error["message"], cut


def test_each_address_is_told_once_in_a_while_with_how_many_came(
    caplog: pytest.LogCaptureFixture,
) -> None:
    strangers = Strangers()
    for at_s in (0.0, 1.0, 9.9, 10.0, 12.0):
        strangers.tell(("10.0.0.1", 4000), "it is TLS", now=at_s)
    strangers.tell(("fd00::2", 4001), "it is TLS", now=12.0)
    strangers.tell(None, "it is TLS", now=12.0)
    assert [record.getMessage().partition(" reason=")[0] for record in caplog.records] == [
        "event=not_http peer=10.0.0.1:4000 new=1",
        "event=not_http peer=10.0.0.1:4000 new=3",
        "event=not_http peer=[fd00::2]:4001 new=1",
        "event=not_http peer=unknown:0 new=1",
    ]


def test_a_scan_from_many_addresses_does_not_fill_the_memory(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(strangers_room, "MAX_ADDRESSES", 3)
    strangers = Strangers()
    for number in (1, 2, 3, 4, 1, 4):  # the fourth puts the first out, and that is told anew
        strangers.tell((f"10.0.0.{number}", 4000), "it is TLS", now=0.0)
    told = [record.getMessage().partition(":")[0] for record in caplog.records]
    assert told == [f"event=not_http peer=10.0.0.{number}" for number in (1, 2, 3, 4, 1)]


async def test_what_follows_a_body_is_no_header(router: RunningRouter) -> None:
    async with connected(router) as (reader, writer):
        head = b"POST /v1/nothing HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
        writer.write(head + b"1\r\na\r\n0\r\nx-request-id: mine\r\n\r\n")
        async with asyncio.timeout(WAIT_S):
            answer = await reader.readuntil(b"\r\n\r\n")
    assert b"x-request-id: mine" not in answer


@pytest.mark.parametrize("header", [b"", b"connection: keep-alive\r\n", b"connection: close\r\n"])
async def test_a_stream_to_http_1_0_is_not_chunked_and_ends_with_its_connection(
    router: RunningRouter, header: bytes
) -> None:
    """As nginx asks by default: HTTP/1.0 takes the lengths of chunks for a part of the events."""
    await router.start_worker(say([20, 21, EOS]))
    body = json.dumps({"model": MODEL, "prompt": "a", "stream": True}).encode()
    head = b"POST /v1/completions HTTP/1.0\r\ncontent-length: %d\r\n" % len(body)
    async with connected(router) as (reader, writer):
        writer.write(head + header + b"\r\n" + body)
        async with asyncio.timeout(WAIT_S):
            head, _, events = (await reader.read(-1)).partition(b"\r\n\r\n")
    fields = [line.lower() for line in head.split(b"\r\n")]
    assert b" 200 OK" in head
    assert b"connection: close" in fields
    assert not [line for line in fields if line.startswith((b"transfer-enc", b"content-length"))]
    *told, end = events.split(b"\n\n")
    assert end == b""
    assert len(told) > 2
    assert all(event.startswith(b"data: ") for event in told)
    assert told[-1] == b"data: [DONE]"


@pytest.mark.parametrize("path", ["/health", "/nothing"])
async def test_an_answer_of_known_length_to_http_1_0_says_it(
    router: RunningRouter, path: str
) -> None:
    async with connected(router) as (reader, writer):
        writer.write(b"GET %b HTTP/1.0\r\n\r\n" % path.encode())
        async with asyncio.timeout(WAIT_S):
            head, _, body = (await reader.read(-1)).partition(b"\r\n\r\n")
    assert b"content-length: %d\r\n" % len(body) in head + b"\r\n"
    assert b"transfer-encoding" not in head


async def test_http_1_0_is_not_told_to_continue(router: RunningRouter) -> None:
    """It knows no such answer and would take it for the answer; RFC 9110, 10.1.1."""
    async with connected(router) as (reader, writer):
        writer.write(ASKED.replace(b"HTTP/1.1", b"HTTP/1.0\r\nexpect: 100-continue"))
        assert (await reader.readline()).split()[1] == b"503"  # no worker is there


async def test_a_client_of_http_1_0_that_leaves_ends_its_stream(router: RunningRouter) -> None:
    async def one_token(worker: ScriptedWorker, generate: Generate) -> None:
        worker.output(generate, (20,))

    worker = await router.start_worker(one_token)
    body = json.dumps({"model": MODEL, "prompt": "a", "stream": True}).encode()
    async with connected(router) as (reader, writer):
        head = b"POST /v1/completions HTTP/1.0\r\ncontent-length: %d\r\n\r\n" % len(body)
        writer.write(head + body)
        async with asyncio.timeout(WAIT_S):
            await reader.readuntil(b"\n\n")
    await worker.wait_for(lambda: len(worker.aborts) == 1)
    await router.until_idle()


async def test_a_stream_to_http_1_1_leaves_its_connection_open(router: RunningRouter) -> None:
    await router.start_worker(say([20, EOS]))
    body = json.dumps({"model": MODEL, "prompt": "a", "stream": True}).encode()
    asked = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body)
    async with connected(router) as (reader, writer):
        for _ in range(2):
            writer.write(asked + body)
            async with asyncio.timeout(WAIT_S):
                assert b"transfer-encoding: chunked" in await reader.readuntil(b"\r\n\r\n")
                await reader.readuntil(b"\r\n0\r\n\r\n")
