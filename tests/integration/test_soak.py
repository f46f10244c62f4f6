"""Small pools, shared prefixes, leaving clients: everything competes for blocks at once.

Admission on decode, first tickets, preemption and prefill's queue wait for each other in ways that
no single scenario plays. Whatever the order, every answer is right and every block comes back.
"""

import asyncio
import random
from pathlib import Path

import httpx
import pytest

from tests.integration.models import VOCAB_SIZE, tiny_model
from tests.integration.requests import generate_reference, prompt_of
from tests.integration.stack import Stack
from tests.integration.streams import stream

pytestmark = [pytest.mark.ucx, pytest.mark.timeout(900)]

NUM_REQUESTS = 96
NUM_TOKENS = 24


def make_prompts(generator: random.Random) -> list[list[int]]:
    """Return prompts of which many begin alike, and some are equal."""
    bases = [prompt_of(length, VOCAB_SIZE, seed=9) for length in (48, 112, 130)]
    prompts: list[list[int]] = []
    for number in range(NUM_REQUESTS):
        base = generator.choice([*bases, []])
        tail = prompt_of(generator.randrange(1, 120), VOCAB_SIZE, seed=number)
        prompts.append(generator.choice(prompts) if number % 9 == 8 else base + tail)
    return prompts


TIERS = {"host_tier_gib": 0.001, "storage_staging_mib": 1}
"""Smaller than what passes through, so that contents are thrown out and bounds are met."""


@pytest.mark.parametrize(
    ("family", "num_blocks", "seed", "has_tiers"),
    [
        ("llama", 24, 1, True),
        pytest.param("mistral", 24, 2, False, marks=pytest.mark.slow),
        pytest.param("gemma3", 110, 3, False, marks=pytest.mark.slow),
        pytest.param("gemma3", 110, 4, True, marks=pytest.mark.slow),
    ],
)
def test_pools_that_hold_a_few_requests_serve_many(
    family: str, num_blocks: int, seed: int, *, has_tiers: bool, tmp_path: Path
) -> None:
    tiers = {**TIERS, "storage_url": (tmp_path / "kv").as_uri()} if has_tiers else {}
    model_path = tiny_model(family, tmp_path)
    generator = random.Random(seed)
    prompts = make_prompts(generator)
    leavers = {n: generator.randrange(1, NUM_TOKENS) for n in range(0, NUM_REQUESTS, 4)}
    stayers = [n for n in range(NUM_REQUESTS) if n not in leavers]
    expected = generate_reference(model_path, [prompts[n] for n in stayers], num_tokens=NUM_TOKENS)

    async def ask(url: str) -> list[list[int] | None]:
        limits = httpx.Limits(max_connections=NUM_REQUESTS)
        async with httpx.AsyncClient(base_url=url, timeout=300, limits=limits) as client:
            return await asyncio.gather(
                *(
                    stream(client, prompt, NUM_TOKENS, leave_after=leavers.get(n))
                    for n, prompt in enumerate(prompts)
                )
            )

    with Stack.open(
        model_path,
        model={"dtype": "float32"},
        cache={"num_blocks": num_blocks, "poison": True, **tiers},
        scheduler={"max_batch_tokens": 64, "max_num_seqs": 16},
        router={"local_prefill_max_tokens": 32},
    ) as stack:
        for _ in range(2):
            answers = asyncio.run(ask(stack.url))
            for n, tokens in zip(stayers, expected, strict=True):
                got = answers[n]
                assert got is not None
                assert got == tokens, (n, len(prompts[n]))
            for role in ("prefill", "decode"):
                stack.wait_idle(f"{role}-0")
                verified = f'sluice_kv_poison_verified_blocks_total{{role="{role}"}}'
                assert stack.metrics(f"{role}-0")[verified] > NUM_REQUESTS
