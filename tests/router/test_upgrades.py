"""A client that would rather speak another protocol is answered in this one, body and all.

The failure guarded against: the parser takes such a request for one without a body, and for the
last of its connection. Java's client sends each POST so, and ``curl --http2`` each request.
"""

import asyncio
import json
import logging
import shutil

import pytest

from tests.router.conftest import MODEL, RunningRouter
from tests.router.model_folder import EOS
from tests.router.raw_connections import SendInPieces, answer_of, connected, next_answer
from tests.router.scripted_worker import say

WISH = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMA\r\n"
BODY = b'{"model": "mine", "prompt": "a"}'
POST = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"
WITH_LENGTH = POST + WISH + b"content-length: %d\r\n\r\n" % len(BODY) + BODY
CHUNKED = POST + b"transfer-encoding: chunked\r\n" + WISH + b"\r\n"
CHUNKED += b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (BODY[:3], BODY[3:], b""))
GET = b"GET /livez HTTP/1.1\r\nhost: x\r\n"


async def its_answers_are_right(reader: asyncio.StreamReader) -> None:
    """Check that the body of a POST was read, and the GET behind it."""
    status, told = await next_answer(reader)
    assert (status, json.loads(told)["error"]["param"]) == (404, "model"), told
    assert "'mine'" in told
    assert (await next_answer(reader))[0] == 200


@pytest.mark.parametrize("asked", [WITH_LENGTH, CHUNKED], ids=["content-length", "chunked"])
@pytest.mark.parametrize("behind", [b"", WISH], ids=["plain", "wish"])
async def test_a_post_that_would_rather_be_http_2_keeps_its_body_however_it_is_cut(
    router: RunningRouter, send_in_pieces: SendInPieces, asked: bytes, behind: bytes
) -> None:
    sent = asked + GET + behind + b"\r\n"
    async with connected(router) as (reader, writer):
        for cut in range(1, len(sent)):
            await send_in_pieces(writer, sent[:cut], sent[cut:])
            await its_answers_are_right(reader)


@pytest.mark.parametrize("asked", [WITH_LENGTH, CHUNKED], ids=["content-length", "chunked"])
async def test_a_wish_to_upgrade_may_come_in_one_packet_or_byte_by_byte(
    router: RunningRouter, send_in_pieces: SendInPieces, asked: bytes
) -> None:
    sent = asked + GET + b"\r\n"
    for pieces in ([sent], [sent[at : at + 1] for at in range(len(sent))]):
        async with connected(router) as (reader, writer):
            await send_in_pieces(writer, *pieces)
            await its_answers_are_right(reader)


async def test_many_wishes_in_one_packet_are_answered_in_turn(router: RunningRouter) -> None:
    async with connected(router) as (reader, writer):
        writer.write((GET + WISH + b"\r\n" + WITH_LENGTH) * 20)
        for _ in range(20):
            assert (await next_answer(reader))[0] == 200
            assert (await next_answer(reader))[0] == 404


@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
async def test_a_wish_to_upgrade_and_to_close_keeps_its_body(
    router: RunningRouter, version: bytes
) -> None:
    async with connected(router) as (reader, writer):
        asked = WITH_LENGTH.replace(b"Connection: ", b"Connection: close, ")
        writer.write(asked.replace(b"HTTP/1.1", b"HTTP/" + version))
        assert (await answer_of(reader))[0] == 404


async def test_a_wish_to_upgrade_and_to_continue_is_told_to_continue(
    router: RunningRouter,
) -> None:
    async with connected(router) as (reader, writer):
        head, _, body = WITH_LENGTH.partition(b"\r\n\r\n")
        writer.write(head + b"\r\nexpect: 100-continue\r\n\r\n")
        async with asyncio.timeout(20):
            assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(body)
        assert (await next_answer(reader))[0] == 404


@pytest.mark.parametrize(
    "framing",
    [
        b"content-length: 2\r\ncontent-length: 3\r\n",
        b"content-length: 2\r\ntransfer-encoding: chunked\r\n",
        b"content-length: 2\r\nx: a\r\n b\r\n",
    ],
)
async def test_a_wish_to_upgrade_makes_no_framing_pass_that_would_not(
    router: RunningRouter, framing: bytes
) -> None:
    for wish in (b"", WISH):
        async with connected(router) as (reader, writer):
            writer.write(POST + framing + wish + b"\r\n{}")
            assert (await answer_of(reader))[0] == 400


@pytest.mark.parametrize("target", [b"x:80", b"/v1/completions", b"http://x/"])
@pytest.mark.parametrize("before", [b"", GET + b"\r\n"], ids=["first", "later"])
async def test_who_asks_for_a_tunnel_is_told_that_there_is_none(
    router: RunningRouter, send_in_pieces: SendInPieces, target: bytes, before: bytes
) -> None:
    async with connected(router) as (reader, writer):
        if before:
            writer.write(before)
            assert (await next_answer(reader))[0] == 200
        await send_in_pieces(writer, b"CON", b"NECT %b HTTP/1.1\r\nhost: x\r\n\r\n" % target)
        status, error = await answer_of(reader)
    assert status == 400
    assert "it is meant for a proxy" in error["message"]


async def test_a_wish_to_upgrade_is_passed_over_without_a_word_in_the_log(
    router: RunningRouter, caplog: pytest.LogCaptureFixture
) -> None:
    async with connected(router) as (reader, writer):
        for _ in range(2):
            writer.write(GET + WISH + b"\r\n")
            assert (await next_answer(reader))[0] == 200
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
async def test_a_client_that_asks_for_http_2_gets_its_completion(router: RunningRouter) -> None:
    await router.start_worker(say([20, EOS]))
    body = json.dumps({"model": MODEL, "prompt": "a"})
    url = f"{router.address.http}/v1/completions"
    options = ("--silent", "--show-error", "--max-time", "60", "--http2", "--json", body)
    curl = await asyncio.create_subprocess_exec(
        "curl", *options, url, url, stdout=asyncio.subprocess.PIPE
    )
    told, _ = await curl.communicate()
    assert told.count(b'"finish_reason":"stop"') == 2, told
