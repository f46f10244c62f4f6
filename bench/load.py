"""A closed loop of streamed completions: each client sends its next request after its last ended.

The client shares the machine with the system that it measures. So it reads raw bytes, notes one
time per stream event, and parses JSON once per request, after its stream ended.
"""

import asyncio
import json
import random
import time

import aiohttp

from bench.samples import LoadRun, RequestSample

REQUEST_TIMEOUT_S = 600.0
_TOKEN_IDS = range(1_000, 30_000)
"""Ordinary text tokens of every vocabulary served here: no control tokens."""


def make_prompt(tokens: int, seed: str) -> list[int]:
    """Return token ids that depend on ``seed`` alone, so that no two requests share a prefix."""
    return random.Random(seed).choices(_TOKEN_IDS, k=tokens)


def load_seed(concurrency: int, repeat: int) -> str:
    """Return the seed of one repeat: the same prompts for every system, new ones each time."""
    return f"serve/{concurrency}/{repeat}"


async def run_load(
    url: str,
    *,
    model: str,
    concurrency: int,
    rounds: int,
    prompt_tokens: int,
    output_tokens: int,
    seed: str,
) -> LoadRun:
    """Send ``rounds`` requests from each of ``concurrency`` clients to ``url``.

    Every request asks for exactly ``output_tokens`` greedy tokens, streamed. A request that fails
    is a sample with a ``failure``; its client goes on.
    """
    bodies = {
        (client, turn): json.dumps(
            {
                "model": model,
                "prompt": make_prompt(prompt_tokens, f"{seed}/{client}/{turn}"),
                "max_tokens": output_tokens,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        ).encode()
        for client in range(concurrency)
        for turn in range(rounds)
    }
    samples: list[RequestSample] = []

    async def client(number: int, session: aiohttp.ClientSession) -> None:
        for turn in range(rounds):
            body = bodies.pop((number, turn))
            samples.append(await _complete(session, url, body, output_tokens))

    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S),
        headers={"Content-Type": "application/json"},
        trust_env=False,
    ) as session:
        started = time.perf_counter()
        async with asyncio.TaskGroup() as clients:
            for number in range(concurrency):
                clients.create_task(client(number, session))
        ended = time.perf_counter()
    return LoadRun(started, ended, samples)


async def _complete(
    session: aiohttp.ClientSession, url: str, body: bytes, output_tokens: int
) -> RequestSample:
    sent = time.perf_counter()
    try:
        async with session.post(f"{url}/v1/completions", data=body) as response:
            if response.status != 200:  # noqa: PLR2004
                reason = (await response.text())[:200]
                return _failed(sent, f"HTTP {response.status}: {reason}")
            events = EventTimes()
            async for data in response.content.iter_any():
                events.feed(data, time.perf_counter())
    except (aiohttp.ClientError, TimeoutError) as error:
        return _failed(sent, f"{type(error).__name__}: {error}")
    return events.sample(sent, output_tokens)


def _failed(sent: float, reason: str) -> RequestSample:
    return RequestSample(sent, (), 0, reason)


class EventTimes:
    """Notes when each server-sent event of one completion stream arrived."""

    def __init__(self) -> None:
        self._unfinished = b""
        self._times: list[float] = []
        self._last_two: list[bytes] = []

    def feed(self, data: bytes, now: float) -> None:
        """Take the bytes of one network read at ``now``; they may end inside an event."""
        data = self._unfinished + data
        end = data.rfind(b"\n\n")
        if end < 0:
            self._unfinished = data
            return
        self._unfinished = data[end + 2 :]
        for event in data[:end].split(b"\n\n"):
            if event.startswith(b"data: {"):
                self._times.append(now)
                self._last_two = [*self._last_two[-1:], event]

    def sample(self, sent: float, output_tokens: int) -> RequestSample:
        """Return the request's sample once its stream has ended.

        It is a failure unless the server reports exactly ``output_tokens``.
        """
        try:
            events: list[object] = [json.loads(event[len(b"data: ") :]) for event in self._last_two]
        except ValueError:
            return _failed(sent, f"not JSON: {self._last_two[-1][:100]!r}")
        match events:
            case [*_, {"error": error}]:
                return _failed(sent, f"error in the stream: {error}")
            case [last, {"choices": [], "usage": {"completion_tokens": int(tokens)}}]:
                times = self._times[:-1]
            case [*_, {"usage": {"completion_tokens": int(tokens)}} as last]:
                times = self._times
            case _:
                return _failed(sent, "the stream ended without usage")
        if tokens != output_tokens:
            return _failed(sent, f"{tokens} tokens instead of {output_tokens}")
        if len(times) > tokens and _is_bare_end(last):
            times = times[:-1]
        return RequestSample(sent, tuple(times), tokens)


def _is_bare_end(event: object) -> bool:
    """Tell whether ``event`` only says why the text ended."""
    match event:
        case {"choices": [{"text": "", "finish_reason": str()}]}:
            return True
        case _:
            return False
