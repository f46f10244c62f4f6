"""The whole deployment says what ``transformers`` says, token for token.

Two fleets, chunks, tickets, reads, prefix hits, overlap and preemption are all allowed to change
when something is computed and where it lies, never what comes out. Everything here is concurrent:
tokens of one request in the blocks of another would show.
"""

from pathlib import Path

import pytest

from tests.integration.models import VOCAB_SIZE, tiny_model
from tests.integration.parity import FLOAT32, assert_same, run
from tests.integration.requests import generate_reference, prompt_of
from tests.integration.stack import Stack

pytestmark = [pytest.mark.ucx, pytest.mark.timeout(600)]

LENGTHS = [
    *(1, 2, 3, 5, 8, 15, 16, 17, 31, 32, 33, 64, 65, 66, 80, 100, 128, 129, 200, 256, 300, 400),
    *(511, 513, 700, 1024, 1500),
]
FAMILIES = [
    "llama",
    "gemma3",
    "gpt_oss",
    *(pytest.param(family, marks=pytest.mark.slow) for family in ("qwen3", "mistral", "gemma2")),
]


@pytest.mark.slow
def test_default_model_answers_as_generate_does(default_model: Path) -> None:
    prompts = [prompt_of(length, 49_000) for length in LENGTHS]
    expected = generate_reference(default_model, prompts, num_tokens=64)
    with Stack.open(default_model, model=FLOAT32) as stack:
        answers = run(stack, prompts, 64)
        assert_same(answers, expected, prompts)
        paths = {a["sluice"]["path"] for a in answers}
        assert paths == {"local", "disaggregated"}
        assert max(a["sluice"]["num_tickets"] for a in answers) >= 3
        # And again, now that every prefix is cached on both sides.
        assert_same(run(stack, prompts, 64), expected, prompts)
        for worker in ("prefill-0", "decode-0"):
            stack.wait_idle(worker)


@pytest.mark.parametrize("family", FAMILIES)
def test_small_model_of_family_answers_as_generate_does(family: str, tmp_path: Path) -> None:
    model_path = tiny_model(family, tmp_path)
    prompts = [prompt_of(length, VOCAB_SIZE) for length in (1, 7, 16, 40, 65, 96, 130, 200, 333)]
    expected = generate_reference(model_path, prompts, num_tokens=48)
    with Stack.open(
        model_path,
        model=FLOAT32,
        cache={"memory_gib": 0.05},
        scheduler={"max_batch_tokens": 64},
        router={"local_prefill_max_tokens": 32},
    ) as stack:
        answers = run(stack, prompts, 48)
        assert_same(answers, expected, prompts)
        assert sum(a["sluice"]["path"] == "disaggregated" for a in answers) == 6
        for worker in ("prefill-0", "decode-0"):
            stack.wait_idle(worker)


def test_preempted_requests_answer_as_generate_does(tmp_path: Path) -> None:
    model_path = tiny_model("llama", tmp_path)
    prompts = [prompt_of(length, VOCAB_SIZE, seed=1) for length in (20, 30, 40, 70, 80, 90, 100)]
    expected = generate_reference(model_path, prompts, num_tokens=100)
    with Stack.open(
        model_path,
        model=FLOAT32,
        cache={"num_blocks": 20, "prefix_caching": False},
        scheduler={"max_batch_tokens": 64},
    ) as stack:
        answers = run(stack, prompts, 100)
        assert_same(answers, expected, prompts)
        assert sum(a["sluice"]["num_preemptions"] for a in answers) > 0
        for worker in ("prefill-0", "decode-0"):
            stack.wait_idle(worker)
