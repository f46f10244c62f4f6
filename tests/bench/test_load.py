"""The client notes arrivals, not guesses, and never takes a broken answer for a good one."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from bench.load import EventTimes, make_prompt, run_load

TOKEN = {"choices": [{"text": "a", "finish_reason": None}], "usage": None}
BARE_END = {"choices": [{"text": "", "finish_reason": "length"}], "usage": None}
DONE = b"data: [DONE]\n\n"


def event(content: object) -> bytes:
    return b"data: " + json.dumps(content).encode() + b"\n\n"


def usage(tokens: int) -> bytes:
    return event({"choices": [], "usage": {"completion_tokens": tokens}})


def test_prompt_depends_on_its_seed_alone() -> None:
    assert make_prompt(512, "a/0/0") == make_prompt(512, "a/0/0")
    assert make_prompt(512, "a/0/0")[0] != make_prompt(512, "a/0/1")[0]
    assert len(make_prompt(512, "a")) == 512


def test_event_split_over_reads_arrives_with_its_last_byte() -> None:
    events = EventTimes()
    events.feed(event(TOKEN)[:20], 1.0)
    events.feed(event(TOKEN)[20:] + event(TOKEN), 2.0)
    events.feed(usage(2) + DONE, 3.0)

    sample = events.sample(0.5, output_tokens=2)

    assert (sample.arrivals, sample.output_tokens, sample.failure) == ((2.0, 2.0), 2, None)


def test_usage_may_come_with_the_last_token() -> None:
    events = EventTimes()
    events.feed(event(TOKEN), 1.0)
    events.feed(event({**TOKEN, "usage": {"completion_tokens": 2}}) + DONE, 2.0)

    assert events.sample(0.0, output_tokens=2).arrivals == (1.0, 2.0)


def test_event_that_only_ends_the_text_is_no_token() -> None:
    events = EventTimes()
    for now in (1.0, 2.0):
        events.feed(event(TOKEN), now)
    events.feed(event(BARE_END) + usage(2) + DONE, 9.0)

    assert events.sample(0.0, output_tokens=2).arrivals == (1.0, 2.0)


def test_last_token_without_text_still_counts() -> None:
    events = EventTimes()
    events.feed(event(TOKEN), 1.0)
    events.feed(event(BARE_END) + usage(2) + DONE, 2.0)

    assert events.sample(0.0, output_tokens=2).arrivals == (1.0, 2.0)


@pytest.mark.parametrize(
    ("stream", "reason"),
    [
        (event(TOKEN) + DONE, "without usage"),
        (b"", "without usage"),
        (event(TOKEN) + usage(1) + DONE, "1 tokens instead of 2"),
        (event(TOKEN) + event({"error": {"message": "worker died"}}), "worker died"),
        (b"data: {broken\n\n", "not JSON"),
    ],
)
def test_broken_answer_is_a_failure(stream: bytes, reason: str) -> None:
    events = EventTimes()
    events.feed(stream, 1.0)

    failure = events.sample(0.0, output_tokens=2).failure

    assert failure is not None
    assert reason in failure


@pytest.fixture
async def serve() -> AsyncIterator[Callable[..., object]]:
    """Starts a server that answers completions with a given handler; returns its URL."""
    servers: list[TestServer] = []

    async def start(handler: Callable[[web.Request], object]) -> str:
        app = web.Application()
        app.router.add_post("/v1/completions", handler)
        servers.append(TestServer(app))
        await servers[-1].start_server()
        return str(servers[-1].make_url("")).rstrip("/")

    yield start
    for server in servers:
        await server.close()


async def test_closed_loop_never_has_more_requests_than_clients(serve: Callable) -> None:
    # Given a server that notes how many requests are open, and which prompts came, and that
    # answers none before as many are open as there are clients
    open_now, most, prompts = 0, 0, []
    all_are_open = asyncio.Event()

    async def answer(request: web.Request) -> web.StreamResponse:
        nonlocal open_now, most
        body = await request.json()
        prompts.append(tuple(body["prompt"]))
        open_now += 1
        most = max(most, open_now)
        if open_now == 3:
            all_are_open.set()
        await asyncio.wait_for(all_are_open.wait(), 60)
        response = web.StreamResponse()
        await response.prepare(request)
        for _ in range(body["max_tokens"]):
            await response.write(event(TOKEN))
            await asyncio.sleep(0)
        await response.write(usage(body["max_tokens"]) + DONE)
        open_now -= 1
        return response

    run = await run_load(
        await serve(answer),
        model="m",
        concurrency=3,
        rounds=4,
        prompt_tokens=8,
        output_tokens=5,
        seed="s",
    )

    assert [sample.failure for sample in run.samples] == [None] * 12
    assert {len(sample.arrivals) for sample in run.samples} == {5}
    assert most == 3
    assert len(set(prompts)) == 12
    assert all(run.started <= s.sent <= s.arrivals[0] <= run.ended for s in run.samples)


async def test_refused_request_fails_with_the_servers_reason(serve: Callable) -> None:
    async def refuse(_request: web.Request) -> web.Response:
        return web.Response(status=503, text="no worker")

    run = await run_load(
        await serve(refuse),
        model="m",
        concurrency=1,
        rounds=2,
        prompt_tokens=8,
        output_tokens=5,
        seed="s",
    )

    assert [sample.failure for sample in run.samples] == ["HTTP 503: no worker"] * 2
