"""KV in float8 on its whole way: reads, prefix hits, windows, host memory, poison.

Each of these moves bytes and must not care what they mean; a scale that stays behind, or a row that
is cut, changes the text.
"""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.integration.models import VOCAB_SIZE, tiny_model
from tests.integration.requests import complete_all, prompt_of
from tests.integration.stack import Stack

pytestmark = [pytest.mark.ucx, pytest.mark.timeout(300)]

FLOAT32 = {"dtype": "float32"}
NUM_NEW = 12
FIRST_TURN = 200
"""Tokens: more than half of the pool."""
NUM_BLOCKS = 24
"""Of the pool, per KV group of the model."""


def say(stack: Stack, prompts: list[list[int]]) -> list[list[int]]:
    """Return the answers, one prompt after the other."""

    async def one_by_one() -> list[dict[str, Any]]:
        options = {"max_tokens": NUM_NEW, "ignore_eos": True, "return_token_ids": True}
        return [
            answer
            for prompt in prompts
            for answer in await complete_all(stack.url, [prompt], **options)
        ]

    return [answer["choices"][0]["token_ids"] for answer in asyncio.run(one_by_one())]


@pytest.mark.parametrize(
    ("family", "num_groups"), [("llama", 1), pytest.param("gemma3", 6, marks=pytest.mark.slow)]
)
def test_float8_comes_back_from_host_memory_as_it_left(
    tmp_path: Path, family: str, num_groups: int
) -> None:
    model_path = tiny_model(family, tmp_path)
    cache = {"kv_dtype": "float8_e4m3"}
    first = prompt_of(FIRST_TURN, VOCAB_SIZE, seed=1)
    between = [prompt_of(330, VOCAB_SIZE, seed=seed) for seed in range(2, 6)]
    with Stack.open(
        model_path,
        model=FLOAT32,
        deploy={"prefill": 0},
        cache=cache | {"memory_gib": 0.05, "prefix_caching": False},
    ) as alone:
        expected = say(alone, [first, *between])
        second = [*first, *expected[0], *prompt_of(20, VOCAB_SIZE, seed=7)]
        expected += say(alone, [second])
    with Stack.open(
        model_path,
        model=FLOAT32,
        cache=cache
        | {
            "num_blocks": NUM_BLOCKS * num_groups,
            "host_tier_gib": 0.01,
            "host_copy_fraction": 1.0,
            "poison": True,
        },
    ) as stack:
        answers = say(stack, [first, *between, second])
        hits = {
            role: stack.metrics(f"{role}-0").get(
                f'sluice_prefix_cache_hit_tokens_total{{role="{role}",tier="host"}}', 0.0
            )
            for role in ("prefill", "decode")
        }
        for worker in ("prefill-0", "decode-0"):
            stack.wait_idle(worker)

    assert answers == expected
    assert max(hits.values()) > 0
