"""Workers that drain under load, and two routers that share a fleet: no client notices.

Poison is on: a worker that meets a block which was written while it was free ends.
"""

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.integration.models import VOCAB_SIZE, tiny_model
from tests.integration.requests import prompt_of
from tests.integration.stack import Stack
from tests.integration.streams import stream

pytestmark = [pytest.mark.ucx, pytest.mark.slow, pytest.mark.timeout(300)]

SECTIONS: dict[str, dict[str, Any]] = {
    "model": {"dtype": "float32"},
    "cache": {"memory_gib": 0.05, "poison": True},
    "transfer": {"lease_s": 4.0, "renew_interval_s": 1.0, "read_timeout_s": 3.0},
    "router": {"admission_wait_s": 60.0, "worker_silence_s": 20.0, "max_attempts": 1},
}
NUM_TOKENS = 340
ENDLESS = 1800
"""Tokens of streams that shall not end before their router does, however late it is killed."""


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model("llama", tmp_path_factory.mktemp("models"))


@pytest.fixture
def stack(model_path: Path) -> Iterator[Stack]:
    sections = SECTIONS | {"deploy": {"prefill": 2, "decode": 2}}
    with Stack.open(model_path, **sections) as stack:
        yield stack


@pytest.fixture
def shared(model_path: Path) -> Iterator[Stack]:
    with Stack.open(model_path, second_router=True, **SECTIONS) as stack:
        yield stack


@asynccontextmanager
async def client_of(url: str) -> AsyncIterator[httpx.AsyncClient]:
    limits = httpx.Limits(max_connections=100)
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as client:
        yield client


async def streams(
    client: httpx.AsyncClient,
    seeds: range,
    begun: asyncio.Event | None = None,
    *,
    num_tokens: int = NUM_TOKENS,
) -> list[int]:
    """Return how many tokens each of some long and short streams got; any error raises."""
    prompts = [prompt_of(20 if seed % 4 == 0 else 150, VOCAB_SIZE, seed=seed) for seed in seeds]
    results = await asyncio.gather(
        *(stream(client, prompt, num_tokens, leave_after=None, begun=begun) for prompt in prompts)
    )
    return [len(result or ()) for result in results]


def join(stack: Stack, name: str) -> int | None:
    stack.processes[name].join(120)
    return stack.processes[name].exitcode


def test_drained_workers_of_both_roles_finish_their_streams_and_end_by_themselves(
    stack: Stack,
) -> None:
    """With one attempt per request: a drain costs none."""

    async def run() -> list[int]:
        async with client_of(stack.url) as client:
            begun = asyncio.Event()
            first = asyncio.create_task(streams(client, range(16), begun))
            await begun.wait()
            stack.kill("decode-0", signal_number=signal.SIGUSR1)
            stack.kill("prefill-0", signal_number=signal.SIGUSR1)
            assert not first.done()
            second = asyncio.create_task(streams(client, range(100, 112)))
            return await first + await second

    assert set(asyncio.run(run())) == {NUM_TOKENS}
    assert (join(stack, "decode-0"), join(stack, "prefill-0")) == (0, 0)
    for name in ("decode-1", "prefill-1"):
        stack.wait_idle(name)
    assert {worker["worker_id"] for worker in stack.workers()} == {"decode-1", "prefill-1"}


def test_two_routers_share_a_fleet_and_the_loss_of_one_frees_only_its_requests(
    shared: Stack,
) -> None:
    wait_ready(shared.second_url)

    async def run() -> tuple[list[int], list[int] | BaseException]:
        async with client_of(shared.url) as ours, client_of(shared.second_url) as theirs:
            lost_begun, kept_begun = asyncio.Event(), asyncio.Event()
            lost = asyncio.create_task(
                streams(theirs, range(50, 62), lost_begun, num_tokens=ENDLESS)
            )
            await lost_begun.wait()
            kept = asyncio.create_task(streams(ours, range(12), kept_begun))
            await kept_begun.wait()
            assert not kept.done()
            shared.kill("router-1")
            (ended,) = await asyncio.gather(lost, return_exceptions=True)
            return await kept, ended

    kept, lost = asyncio.run(run())
    assert set(kept) == {NUM_TOKENS}
    assert isinstance(lost, httpx.HTTPError)
    for name in ("decode-0", "prefill-0"):
        shared.wait_idle(name)
    # A router that comes back is found at its address again.
    shared.start("router-1")
    wait_ready(shared.second_url)

    async def again() -> list[int]:
        async with client_of(shared.second_url) as client:
            return await streams(client, range(70, 74))

    assert set(asyncio.run(again())) == {NUM_TOKENS}


def wait_ready(url: str) -> None:
    """Wait until the router at ``url`` can pass a generation."""
    deadline = time.monotonic() + 60
    while True:
        try:
            if httpx.get(f"{url}/readyz", timeout=5).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        assert time.monotonic() < deadline, f"{url} is not ready"
        time.sleep(0.1)
