"""Anything may stop at any moment; what is left must be whole.

Each test kills, freezes or leaves in the middle of real work, and then demands three things: every
request ends within seconds, by success or by one clear error; what was not touched finishes; and
every block of every worker that lives is FREE or CACHED again. Poison is on: a worker that meets a
block which was written while it was free ends, and its test fails.
"""

import asyncio
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.integration.models import VOCAB_SIZE, tiny_model
from tests.integration.requests import complete, complete_all, generate_reference, prompt_of
from tests.integration.stack import Stack
from tests.integration.streams import stream

pytestmark = [pytest.mark.ucx, pytest.mark.timeout(400)]

END_S = 100.0
"""A request that has not ended by then hangs. What ends it is a matter of seconds."""
NUM_TOKENS = 60
ENDLESS = 1300
"""Tokens of requests that shall not have ended when something strikes, however late it does."""
MAX_TRIES = 40


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model("llama", tmp_path_factory.mktemp("models"))


@pytest.fixture
def stack(model_path: Path) -> Iterator[Stack]:
    with Stack.open(
        model_path,
        model={"dtype": "float32"},
        cache={"memory_gib": 0.05, "poison": True},
        transfer={"lease_s": 4.0, "renew_interval_s": 1.0, "read_timeout_s": 3.0},
        scheduler={"max_batch_tokens": 64},
        router={"admission_wait_s": 3.0, "worker_silence_s": 10.0},
    ) as stack:
        yield stack


def test_64_streams_of_which_many_leave(stack: Stack, model_path: Path) -> None:
    generator = random.Random(3)
    prompts = [prompt_of(generator.randrange(1, 250), VOCAB_SIZE, seed=n) for n in range(64)]
    leavers = {n: generator.randrange(1, 30) for n in range(64) if n % 3 == 0}
    stayers = [n for n in range(64) if n not in leavers]

    async def run() -> list[list[int] | None]:
        limits = httpx.Limits(max_connections=100)
        async with httpx.AsyncClient(base_url=stack.url, timeout=200, limits=limits) as client:
            return await asyncio.gather(
                *(
                    stream(client, prompt, 40, leave_after=leavers.get(n))
                    for n, prompt in enumerate(prompts)
                )
            )

    answers = asyncio.run(run())
    expected = generate_reference(model_path, [prompts[n] for n in stayers], num_tokens=40)
    assert [answers[n] for n in stayers] == expected
    for worker in ("prefill-0", "decode-0"):
        stack.wait_idle(worker)


def test_leaving_while_the_prompt_is_still_computed(stack: Stack) -> None:
    looks = httpx.Client(base_url=stack.url, timeout=30)

    def has_come(name: str) -> bool:
        """Return whether the request is with the prefill worker."""
        found = looks.get(f"/v1/trace/{name}")
        processes = found.json()["processes"] if found.status_code == 200 else []
        return any(p["name"] == "prefill-0" and p["events"] for p in processes)

    async def leaves(number: int) -> bool:
        """Return whether the client was there to leave: its answer may be faster than a look."""
        prompt, name = prompt_of(1500, VOCAB_SIZE, seed=number), f"leaver-{number}"
        async with httpx.AsyncClient(
            base_url=stack.url, timeout=60, headers={"x-request-id": name}
        ) as client:
            asking = asyncio.create_task(complete(client, prompt, max_tokens=200, ignore_eos=True))
            async with asyncio.timeout(END_S):
                while not await asyncio.to_thread(has_come, name):
                    pass  # a look takes as long as the router's answer
            has_left = asking.cancel()
            await asyncio.wait({asking})
            return has_left

    async def leave_again_and_again() -> None:
        num_left = 0
        for number in range(MAX_TRIES):
            num_left += await leaves(number)
            if num_left == 12:
                return
        pytest.fail("they are answered already")

    with looks:
        asyncio.run(leave_again_and_again())
    for worker in ("prefill-0", "decode-0"):
        stack.wait_idle(worker)


async def under_load(
    stack: Stack, strike: Any, *, num_requests: int = 24, num_endless: int = 0
) -> list[tuple[int, dict[str, Any]]]:
    """Strike while requests are in all stages; return the status and body of each.

    The first ``num_endless`` of them are in their midst then, for certain.
    """

    async def one(client: httpx.AsyncClient, n: int) -> tuple[int, dict[str, Any]]:
        response = await client.post(
            "/v1/completions",
            json={
                "model": "model",
                "prompt": prompt_of(100 + 37 * n % 600, VOCAB_SIZE, seed=n),
                "max_tokens": ENDLESS if n < num_endless else NUM_TOKENS,
                "temperature": 0,
                "ignore_eos": True,
                "return_token_ids": True,
            },
        )
        return response.status_code, response.json()

    async with httpx.AsyncClient(base_url=stack.url, timeout=120) as client:
        tasks = [asyncio.create_task(one(client, n)) for n in range(num_requests)]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        strike()
        async with asyncio.timeout(END_S):
            return await asyncio.gather(*tasks)


def test_c20_killed_prefill_worker_costs_nobody_the_answer(stack: Stack, model_path: Path) -> None:
    results = asyncio.run(under_load(stack, lambda: stack.kill("prefill-0")))
    # Every request is computed on decode alone, and says what it would have said.
    assert {status for status, _ in results} == {200}
    prompts = [prompt_of(100 + 37 * n % 600, VOCAB_SIZE, seed=n) for n in range(24)]
    expected = generate_reference(model_path, prompts, num_tokens=NUM_TOKENS)
    assert [body["choices"][0]["token_ids"] for _, body in results] == expected
    stack.wait_idle("decode-0")
    # And a new life of the worker is used again.
    stack.start("prefill-0")
    stack.wait_ready()
    (answer,) = asyncio.run(complete_all(stack.url, [prompt_of(300, VOCAB_SIZE, seed=99)]))
    assert answer["sluice"]["path"] == "disaggregated"
    for worker in ("prefill-0", "decode-0"):
        stack.wait_idle(worker)


def test_killed_decode_worker_ends_requests_with_one_clear_error(stack: Stack) -> None:
    results = asyncio.run(under_load(stack, lambda: stack.kill("decode-0"), num_endless=12))
    failed = [(status, body) for status, body in results if status != 200]
    assert failed
    for status, body in failed:
        assert status == 503, body
        assert body["error"]["message"]
    stack.start("decode-0")
    stack.wait_ready()
    (answer,) = asyncio.run(complete_all(stack.url, [prompt_of(300, VOCAB_SIZE, seed=98)]))
    assert answer["usage"]["completion_tokens"] == 16
    # The leases of the dead reader run out.
    for worker in ("prefill-0", "decode-0"):
        stack.wait_idle(worker)


def test_i06_frozen_prefill_worker_frees_nothing_before_proof(stack: Stack) -> None:
    def freeze() -> None:
        stack.kill("prefill-0", signal_number=signal.SIGSTOP)

    results = asyncio.run(under_load(stack, freeze))
    assert {status for status, _ in results} == {200}
    stack.wait_idle("decode-0")
    samples = stack.metrics("decode-0")
    oldest = "sluice_kv_block_withheld_oldest_seconds"
    assert samples[f'{oldest}{{role="decode",state="quarantined"}}'] == 0
    assert samples['sluice_kv_quarantine_limit_blocks{role="decode"}'] > 0
    stack.kill("prefill-0", signal_number=signal.SIGCONT)
    stack.wait_ready()
    for worker in ("prefill-0", "decode-0"):
        stack.wait_idle(worker)


def test_h02_killed_router_leaves_no_block_behind(stack: Stack) -> None:
    async def ask() -> None:
        async with httpx.AsyncClient(base_url=stack.url, timeout=60) as client:
            begun = [asyncio.Event() for _ in range(8)]
            tasks = [
                asyncio.create_task(
                    stream(
                        client,
                        prompt_of(400, VOCAB_SIZE, seed=n),
                        400,
                        leave_after=None,
                        begun=has_begun,
                    )
                )
                for n, has_begun in enumerate(begun)
            ]
            await asyncio.wait_for(begun[0].wait(), END_S)
            stack.kill("router")
            await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(ask())
    stack.start("router")
    stack.wait_ready()
    for worker in ("prefill-0", "decode-0"):
        stack.wait_idle(worker)


def test_c17_pools_of_both_sides_do_not_wait_for_each_other(model_path: Path) -> None:
    """A younger request must not hold decode's memory while it waits on prefill for an older one.

    The older one fills prefill's pool and waits for memory on decode; the younger one has a prefix
    on decode, and waits on prefill for the older one's blocks.
    """
    base = prompt_of(112, VOCAB_SIZE, seed=1)
    older, younger = prompt_of(245, VOCAB_SIZE, seed=2), base + prompt_of(130, VOCAB_SIZE, seed=3)

    async def ask(stack: Stack) -> list[dict[str, Any]]:
        async with httpx.AsyncClient(base_url=stack.url, timeout=60) as client:
            await complete(client, base, max_tokens=4)
            first = asyncio.create_task(complete(client, older, max_tokens=4))
            await asyncio.sleep(0.004)
            second = asyncio.create_task(complete(client, younger, max_tokens=4))
            return await asyncio.gather(first, second)

    with Stack.open(
        model_path,
        model={"dtype": "float32"},
        cache={"num_blocks": 24, "poison": True},
        router={"local_prefill_max_tokens": 32},
    ) as stack:
        answers = asyncio.run(ask(stack))
        assert [answer["usage"]["completion_tokens"] for answer in answers] == [4, 4]
        for worker in ("prefill-0", "decode-0"):
            stack.wait_idle(worker)
