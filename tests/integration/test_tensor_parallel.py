"""A worker of several ranks says what one rank says, and no rank outlives it.

Each rank computes, keeps and reads its own heads. A read that some rank missed, a step that some
rank did not finish, or a rank that is left behind would give wrong text or hang; here real
processes with real UCX between them answer as ``transformers`` does.
"""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.integration.models import VOCAB_SIZE, tiny_model
from tests.integration.requests import complete_all, generate_reference, prompt_of
from tests.integration.stack import Stack

pytestmark = [pytest.mark.ucx, pytest.mark.timeout(600)]

TWO_RANKS = {"tensor_parallel_size": 2, "num_threads": 1}
SECTIONS: dict[str, Any] = {
    "model": {"dtype": "float32"},
    "cache": {"memory_gib": 0.02},
    "scheduler": {"max_batch_tokens": 64},
    "router": {"local_prefill_max_tokens": 32},
}
LENGTHS = (1, 7, 16, 40, 65, 96, 130, 200)


def run(stack: Stack, prompts: Sequence[list[int]], num_tokens: int) -> list[dict[str, Any]]:
    return asyncio.run(
        complete_all(
            stack.url, prompts, max_tokens=num_tokens, ignore_eos=True, return_token_ids=True
        )
    )


@pytest.mark.parametrize("family", ["llama", pytest.param("gemma3", marks=pytest.mark.slow)])
def test_two_ranks_on_both_sides_answer_as_generate_does(family: str, tmp_path: Path) -> None:
    model_path = tiny_model(family, tmp_path)
    prompts = [prompt_of(length, VOCAB_SIZE) for length in LENGTHS]
    expected = generate_reference(model_path, prompts, num_tokens=24)
    with Stack.open(model_path, **SECTIONS, engine=TWO_RANKS) as stack:
        answers = run(stack, prompts, 24)
        assert [a["choices"][0]["token_ids"] for a in answers] == expected
        assert sum(a["sluice"]["path"] == "disaggregated" for a in answers) == 5
        # And again, now that every prefix is cached on both sides.
        answers = run(stack, prompts, 24)
        assert [a["choices"][0]["token_ids"] for a in answers] == expected
        for worker in ("prefill-0", "decode-0"):
            stack.wait_idle(worker)
