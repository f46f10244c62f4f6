"""Windows by layer and by head through a whole deployment: the same words, fewer blocks and bytes.

A block recycled too early, a hole that is read, or a clipped ticket that leaves out what decode
needs gives wrong words and no error. Prompts are up to four windows long and longer, so windows
have moved in prefill and go on moving in decode.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from blockmgr.window import needed_blocks
from core.config import HeadWindowConfig
from core.kv_layout import KVLayout
from tests.engine.tiny_models import WINDOW
from tests.integration.gemma_wheels import gemma3_270m
from tests.integration.head_windows import generate_dense, layout_of
from tests.integration.models import VOCAB_SIZE, tiny_model
from tests.integration.parity import FLOAT32, assert_same, run
from tests.integration.requests import generate_reference, prompt_of
from tests.integration.stack import Stack

pytestmark = [pytest.mark.ucx, pytest.mark.timeout(600)]

LENGTHS = (20, WINDOW, WINDOW + 1, 2 * WINDOW, 70, 4 * WINDOW, 4 * WINDOW + 1)
NUM_TOKENS = 80
HEAD_WINDOW = HeadWindowConfig(window=WINDOW, sink=4, heads=(1,))
MAX_ROUNDS = 10
KV_GROUPS = {"head_window": HEAD_WINDOW.model_dump(exclude_none=True)}


def released_by_windows(stack: Stack, role: str) -> float:
    sample = f'sluice_kv_window_releases_total{{role="{role}",tier="device"}}'
    return stack.metrics(f"{role}-0")[sample]


def needed_nbytes(layout: KVLayout, num_tokens: int) -> int:
    """Bytes of the blocks that hold what decode still reads of a prompt."""
    runs = [run for g in layout.groups for run in needed_blocks(g, layout.block_size, num_tokens)]
    return sum(map(len, runs)) * layout.block_nbytes


def whole_nbytes(layout: KVLayout, num_tokens: int) -> int:
    return len(layout.groups) * layout.num_blocks_for(num_tokens) * layout.block_nbytes


def assert_clipped(
    answers: Sequence[dict[str, Any]], prompts: Sequence[list[int]], layout: KVLayout
) -> None:
    for answer, prompt in zip(answers, prompts, strict=True):
        assert answer["sluice"]["path"] == "disaggregated"
        sent = answer["sluice"]["kv_nbytes"]
        assert sent == needed_nbytes(layout, len(prompt)), len(prompt)
        if len(prompt) > 2 * WINDOW + layout.block_size:
            assert sent < whole_nbytes(layout, len(prompt))


def serve_crowded(
    model_path: Path, expected: list[list[int]], prompts: list[list[int]], **sections: Any
) -> None:
    """Serve all at once in a pool too small for them, and hold the words to ``expected``.

    Twice, and again until someone had to give its blocks up: who meets whom is a matter of time.
    """
    with Stack.open(
        model_path,
        model=FLOAT32,
        scheduler={"max_batch_tokens": 64, "reserve_blocks_min": 0},
        router={"local_prefill_max_tokens": 32},
        **sections,
    ) as stack:
        num_preemptions = num_rounds = 0
        while num_rounds < 2 or (not num_preemptions and num_rounds < MAX_ROUNDS):
            num_rounds += 1
            answers = run(stack, prompts, NUM_TOKENS)
            assert_same(answers, expected, prompts)
            num_preemptions += sum(a["sluice"]["num_preemptions"] for a in answers)
            assert {a["sluice"]["path"] for a in answers} == {"local", "disaggregated"}
        assert num_preemptions > 0
        for role in ("prefill", "decode"):
            stack.wait_idle(f"{role}-0")
            assert released_by_windows(stack, role) > 0


@pytest.mark.parametrize(
    ("family", "num_blocks"),
    [
        ("mistral", 16),
        ("gpt_oss", 34),
        pytest.param("gemma2", 34, marks=pytest.mark.slow),
        pytest.param("gemma3", 90, marks=pytest.mark.slow),
    ],
)
def test_preempted_requests_of_models_with_windows_answer_as_generate_does(
    family: str, num_blocks: int, tmp_path: Path
) -> None:
    model_path = tiny_model(family, tmp_path)
    prompts = [prompt_of(length, VOCAB_SIZE, seed=3) for length in LENGTHS]
    expected = generate_reference(model_path, prompts, num_tokens=NUM_TOKENS)
    serve_crowded(model_path, expected, prompts, cache={"num_blocks": num_blocks, "poison": True})


def test_preempted_requests_of_heads_with_windows_answer_as_dense_masks_do(tmp_path: Path) -> None:
    model_path = tiny_model("llama", tmp_path)
    prompts = [prompt_of(length, VOCAB_SIZE, seed=3) for length in LENGTHS]
    expected = generate_dense(model_path, HEAD_WINDOW, prompts, num_tokens=NUM_TOKENS)
    serve_crowded(
        model_path,
        expected,
        prompts,
        cache={"num_blocks": 34, "poison": True},
        kv_groups=KV_GROUPS,
    )


@pytest.mark.parametrize("family", ["mistral", "gemma2"])
def test_d16_what_is_behind_the_windows_of_layers_is_not_read(family: str, tmp_path: Path) -> None:
    model_path = tiny_model(family, tmp_path)
    prompts = [prompt_of(length, VOCAB_SIZE) for length in (65, 4 * WINDOW, 200, 333)]
    expected = generate_reference(model_path, prompts, num_tokens=24)
    with Stack.open(model_path, model=FLOAT32, cache={"num_blocks": 400}) as stack:
        answers = run(stack, prompts, 24)
        assert_same(answers, expected, prompts)
        assert_clipped(answers, prompts, layout_of(model_path))


def test_g16_a_recycled_prompt_sends_sinks_and_windows_of_its_heads(tmp_path: Path) -> None:
    model_path = tiny_model("llama", tmp_path)
    prompts = [prompt_of(length, VOCAB_SIZE) for length in (65, 4 * WINDOW, 200, 333)]
    expected = generate_dense(model_path, HEAD_WINDOW, prompts, num_tokens=24)
    with Stack.open(
        model_path, model=FLOAT32, cache={"num_blocks": 400}, kv_groups=KV_GROUPS
    ) as stack:
        answers = run(stack, prompts, 24)
        assert_same(answers, expected, prompts)
        assert_clipped(answers, prompts, layout_of(model_path, HEAD_WINDOW))
        assert released_by_windows(stack, "prefill") > 0
        # And again, with the prefix of every group's span cached on both sides.
        assert_same(run(stack, prompts, 24), expected, prompts)


@pytest.mark.slow
def test_gemma_3_270m_answers_as_generate_does_beyond_four_windows() -> None:
    model_path = gemma3_270m()
    layout = layout_of(model_path)
    windows = {group.window for group in layout.groups}
    assert windows == {512, None}
    prompts = [prompt_of(length, 200_000) for length in (5, 512, 700, 2100)]
    expected = generate_reference(model_path, prompts, num_tokens=24)
    with Stack.open(model_path, model=FLOAT32, cache={"memory_gib": 0.4}) as stack:
        answers = run(stack, prompts, 24)
        assert_same(answers, expected, prompts)
        assert released_by_windows(stack, "prefill") > 0
        long = answers[-1]["sluice"]["kv_nbytes"]
        assert long == needed_nbytes(layout, len(prompts[-1]))
        assert long < 0.5 * whole_nbytes(layout, len(prompts[-1]))
