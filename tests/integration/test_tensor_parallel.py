"""A worker of several ranks says what one rank says, and no rank outlives it.

Each rank computes, keeps and reads its own heads. A read that some rank missed, a step that some
rank did not finish, or a rank that is left behind would give wrong text or hang; here real
processes with real UCX between them answer as ``transformers`` does.
"""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.integration.models import VOCAB_SIZE, tiny_model
from tests.integration.requests import complete, complete_all, generate_reference, prompt_of
from tests.integration.stack import ANSWER_TIMEOUT_S, Stack
from tests.ranks.worker_ranks import followers

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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("prefill_ranks", "decode_ranks"),
    [(1, 2), (2, 1), (1, 4)],
    ids=["split", "d09_fan_in", "c16_copies"],
)
def test_c16_d09_ranks_of_other_number_on_the_two_sides_answer_as_generate_does(
    prefill_ranks: int, decode_ranks: int, tmp_path: Path
) -> None:
    """Two KV heads: each decode rank reads its own from whoever has it, and prefill frees once."""
    model_path = tiny_model("llama", tmp_path)
    prompts = [prompt_of(length, VOCAB_SIZE) for length in LENGTHS]
    expected = generate_reference(model_path, prompts, num_tokens=8)
    with Stack.open(
        model_path,
        **SECTIONS,
        prefill={"engine": {"tensor_parallel_size": prefill_ranks}},
        decode={"engine": {"tensor_parallel_size": decode_ranks}},
    ) as stack:
        answers = run(stack, prompts, 8)
        assert [a["choices"][0]["token_ids"] for a in answers] == expected
        assert sum(a["sluice"]["path"] == "disaggregated" for a in answers) == 5
        for worker in ("prefill-0", "decode-0"):
            stack.wait_idle(worker)


async def strike_under_load(
    stack: Stack, prompts: Sequence[list[int]], strike: Callable[[], None]
) -> list[dict[str, Any]]:
    """Ask everything at once, strike when the first answer is there, and return all answers."""
    async with httpx.AsyncClient(base_url=stack.url, timeout=300) as client:
        asked = [
            asyncio.create_task(
                complete(client, prompt, max_tokens=24, ignore_eos=True, return_token_ids=True)
            )
            for prompt in prompts
        ]
        await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
        strike()
        return await asyncio.gather(*asked)


@pytest.mark.slow
def test_a13_a_prefill_worker_whose_rank_is_killed_ends_and_costs_nobody_the_answer(
    tmp_path: Path,
) -> None:
    """The decode worker goes on alone, and what was being read from both ranks is computed."""
    model_path = tiny_model("llama", tmp_path)
    prompts = [prompt_of(40 + 30 * n, VOCAB_SIZE, seed=n) for n in range(10)]
    expected = generate_reference(model_path, prompts, num_tokens=24)
    with Stack.open(model_path, **SECTIONS, engine=TWO_RANKS) as stack:
        prefill = stack.processes["prefill-0"]
        dead = stack.worker("prefill-0")["incarnation"]
        ranks = followers(prefill.pid)
        assert len(ranks) == 1

        answers = asyncio.run(strike_under_load(stack, prompts, ranks[0].kill))

        assert [a["choices"][0]["token_ids"] for a in answers] == expected
        prefill.join(ANSWER_TIMEOUT_S)
        assert prefill.exitcode == 1
        assert not ranks[0].is_running()
        stack.wait_idle("decode-0")
        # And a new life of the worker is used again, with new ranks.
        stack._dead.add(dead)
        stack.start("prefill-0")
        stack.wait_ready()
        (answer,) = run(stack, [prompt_of(200, VOCAB_SIZE, seed=99)], 24)
        assert answer["sluice"]["path"] == "disaggregated"
        for worker in ("prefill-0", "decode-0"):
            stack.wait_idle(worker)
