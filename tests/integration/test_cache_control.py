"""Who may share a prefix, who may not, and what forgetting one means, in a whole deployment.

The failures guarded against: one tenant that learns by the speed of an answer what another has
asked; a reset that says "done" and leaves a hit behind; usage that counts cached tokens wrongly.
"""

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from deploy.api_client import ApiClient, CacheReset
from deploy.cli.parser import run
from tests.integration.models import VOCAB_SIZE, tiny_model
from tests.integration.requests import complete, prompt_of
from tests.integration.stack import Stack

pytestmark = [pytest.mark.ucx, pytest.mark.timeout(300)]

BLOCK_SIZE = 16
SHORT = 40
"""Tokens: prefilled where it is decoded. Two full blocks and a rest."""
LONG = 200
MAX_TRIES = 8
WAIT_S = 60.0


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with Stack.open(
        tiny_model("llama", tmp_path_factory.mktemp("models")),
        model={"dtype": "float32"},
        cache={"memory_gib": 0.02, "block_size": BLOCK_SIZE},
        router={"local_prefill_max_tokens": 64},
    ) as stack:
        yield stack


def ask(stack: Stack, prompt: list[int], **body: Any) -> tuple[int, str]:
    """Return the cached tokens that usage shows, and the path."""

    async def once() -> dict[str, Any]:
        async with httpx.AsyncClient(base_url=stack.url, timeout=60) as client:
            return await complete(client, prompt, max_tokens=2, ignore_eos=True, **body)

    answer = asyncio.run(once())
    assert answer["usage"]["prompt_tokens"] == len(prompt)
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"], answer["sluice"]["path"]


def full_blocks(num_tokens: int) -> int:
    """Return the tokens of a prompt that can be hit: its last one is always computed."""
    return (num_tokens - 1) // BLOCK_SIZE * BLOCK_SIZE


@pytest.mark.parametrize(("num_tokens", "path"), [(SHORT, "local"), (LONG, "disaggregated")])
def test_prefixes_are_shared_within_one_salt_only(stack: Stack, num_tokens: int, path: str) -> None:
    prompt = prompt_of(num_tokens, VOCAB_SIZE, seed=11)
    assert ask(stack, prompt, cache_salt="tenant-a") == (0, path)
    assert ask(stack, prompt, cache_salt="tenant-a")[0] == full_blocks(num_tokens)
    assert ask(stack, prompt, cache_salt="tenant-b") == (0, path)
    assert ask(stack, prompt) == (0, path)
    assert ask(stack, prompt)[0] == full_blocks(num_tokens)


def test_prefill_shares_within_one_salt_only_where_decode_has_nothing(stack: Stack) -> None:
    """Each worker keeps a cache of its own: prefill's must not leak either."""
    prompt = prompt_of(LONG, VOCAB_SIZE, seed=12)
    assert ask(stack, prompt, cache_salt="a") == (0, "disaggregated")
    # Decode looks up nothing of this one: its first block differs from all that it has.
    hits = stack.metrics("prefill-0")[HITS_ON_PREFILL]
    assert ask(stack, prompt, cache_salt="b") == (0, "disaggregated")
    assert stack.metrics("prefill-0")[HITS_ON_PREFILL] == hits


HITS_ON_PREFILL = 'sluice_prefix_cache_hit_tokens_total{role="prefill",tier="device"}'


def test_a18_after_a_reset_nothing_hits_on_any_worker(stack: Stack) -> None:
    prompts = [prompt_of(num_tokens, VOCAB_SIZE, seed=13) for num_tokens in (SHORT, LONG)]
    for prompt in prompts:
        ask(stack, prompt)
        assert ask(stack, prompt)[0] == full_blocks(len(prompt))
    for worker in ("prefill-0", "decode-0"):
        stack.wait_idle(worker)

    reset = answered_reset(stack)

    assert reset.status == "done"
    assert {worker.worker_id for worker in reset.workers} == {"prefill-0", "decode-0"}
    for worker in ("prefill-0", "decode-0"):
        assert stack.blocks(worker)["cached"] == 0
    for prompt in prompts:
        assert ask(stack, prompt)[0] == 0


def answered_reset(stack: Stack) -> CacheReset:
    """Reset all caches, and again if a worker did not come to say how far it is."""
    client = ApiClient(stack.url, timeout_s=WAIT_S)
    for _ in range(MAX_TRIES):
        reset = client.reset_caches()
        if reset.status != "unreachable":
            return reset
    pytest.fail("a worker does not answer")


def test_a18_a_reset_is_pending_while_what_was_in_use_still_is(
    stack: Stack, capsys: pytest.CaptureFixture[str]
) -> None:
    prompt = prompt_of(SHORT, VOCAB_SIZE, seed=14)
    client = ApiClient(stack.url, timeout_s=WAIT_S)

    async def reset_in_the_middle() -> str:
        """Return how far the reset was told to be; "done" if it came when all was generated."""
        async with httpx.AsyncClient(base_url=stack.url, timeout=60) as http:
            body = {
                "model": "model",
                "prompt": prompt,
                "max_tokens": 1500,
                "ignore_eos": True,
                "n": 8,
            }
            async with http.stream(
                "POST", "/v1/completions", json=body | {"stream": True}
            ) as reply:
                lines = reply.aiter_lines()  # once nobody holds them, the client has left
                await anext(lines)
                return (await asyncio.to_thread(client.reset_caches)).status

    assert "pending" in (asyncio.run(reset_in_the_middle()) for _ in range(MAX_TRIES))
    deadline = time.monotonic() + WAIT_S  # the client has left: its blocks are FREE soon
    while (status := status_of(client)) != "done":
        assert time.monotonic() < deadline, status
        time.sleep(0.02)
    assert ask(stack, prompt)[0] == 0
    command = ["cache", "reset", "--url", stack.url, "--wait", str(WAIT_S)]
    assert 0 in (run(command) for _ in range(MAX_TRIES))
    assert capsys.readouterr().out.splitlines()[-2:] == ["decode-0: done", "prefill-0: done"]


def status_of(client: ApiClient) -> str:
    (state,) = {cache.reset for cache in client.caches() if cache.role == "decode"}
    return state


def test_show_prints_a_line_per_worker(stack: Stack, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["cache", "show", "--url", stack.url]) == 0
    shown = capsys.readouterr().out
    for text in ("decode-0", "prefill-0", "device", "%"):
        assert text in shown


def test_ages_of_blocks_are_exported(stack: Stack) -> None:
    ask(stack, prompt_of(LONG, VOCAB_SIZE, seed=15))
    for worker, role in (("prefill-0", "prefill"), ("decode-0", "decode")):
        stack.wait_idle(worker)
        answered_reset(stack)
        samples = stack.metrics(worker)
        lifetime = f'sluice_kv_block_lifetime_seconds_count{{role="{role}",tier="device"}}'
        assert samples[lifetime] > 0
        for state in ("fenced", "quarantined"):
            labels = f'{{role="{role}",state="{state}"}}'
            assert samples[f"sluice_kv_block_withheld_oldest_seconds{labels}"] == 0
            assert f"sluice_kv_block_withheld_seconds_count{labels}" in samples
