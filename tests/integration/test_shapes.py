"""Prefill and decode whose blocks differ in size or dtype answer as if they did not.

The KV of each request crosses between two layouts: a slot that is off by one, a token that is left
out or a scale that is another row's gives other tokens than ``transformers`` has.
"""

from pathlib import Path

import numpy as np
import pytest
import torch

from core.config import CacheConfig, ModelConfig, SluiceConfig
from core.ids import BlockId, Slot
from core.kv_unpack import SlotRun, Unpack
from engine.batch import SequenceInput
from engine.forward import PagedModel
from engine.kv_conversion import KVConverter
from engine.loading import load_model
from engine.plan import build_plan
from tests.integration.models import VOCAB_SIZE, tiny_model
from tests.integration.parity import FLOAT32, assert_same, run
from tests.integration.requests import generate_reference, prompt_of
from tests.integration.stack import Stack

pytestmark = [pytest.mark.ucx, pytest.mark.timeout(600)]

LENGTHS = (65, 66, 80, 95, 96, 97, 130, 200, 333)
PROMPTS = [prompt_of(length, VOCAB_SIZE) for length in LENGTHS]


@pytest.mark.parametrize(
    ("family", "there", "here"),
    [
        ("llama", 32, 16),
        ("llama", 16, 32),
        pytest.param("qwen3", 16, 48, marks=pytest.mark.slow),
        pytest.param("gemma3", 32, 16, marks=pytest.mark.slow),
    ],
)
def test_blocks_of_another_size_answer_as_generate_does(
    family: str, there: int, here: int, tmp_path: Path
) -> None:
    model_path = tiny_model(family, tmp_path)
    expected = generate_reference(model_path, PROMPTS, num_tokens=24)
    with Stack.open(
        model_path,
        model=FLOAT32,
        cache={"memory_gib": 0.05, "poison": True},
        prefill={"cache": {"block_size": there}},
        decode={"cache": {"block_size": here}},
        scheduler={"max_batch_tokens": 64},
        transfer={"checksums": family == "qwen3"},
    ) as stack:
        answers = run(stack, PROMPTS, 24)
        assert_same(answers, expected, PROMPTS)
        assert {answer["sluice"]["path"] for answer in answers} == {"disaggregated"}
        assert max(answer["sluice"]["num_tickets"] for answer in answers) >= 3
        # Longer ones whose first part decode has: its hit may end within a block of prefill.
        longer = [[*prompt, *prompt_of(70 + at, VOCAB_SIZE)] for at, prompt in enumerate(PROMPTS)]
        expected = generate_reference(model_path, longer, num_tokens=24)
        answers = run(stack, longer, 24)
        assert_same(answers, expected, longer)
        for worker in ("prefill-0", "decode-0"):
            stack.wait_idle(worker)


@pytest.mark.slow
def test_heads_with_windows_of_their_own_cross_between_block_sizes(tmp_path: Path) -> None:
    model_path = tiny_model("llama", tmp_path)
    sections = {
        "model": FLOAT32,
        "cache": {"memory_gib": 0.05},
        "scheduler": {"max_batch_tokens": 64},
        "kv_groups": {"head_window": {"heads": [1], "window": 40, "sink": 3}},
    }
    with Stack.open(model_path, deploy={"prefill": 0}, **sections) as stack:
        alone = run(stack, PROMPTS, 24)
    with Stack.open(model_path, prefill={"cache": {"block_size": 32}}, **sections) as stack:
        answers = run(stack, PROMPTS, 24)
        assert {answer["sluice"]["path"] for answer in answers} == {"disaggregated"}
    expected = [answer["choices"][0]["token_ids"] for answer in alone]
    assert_same(answers, expected, PROMPTS)


def test_c15_blocks_that_a_window_keeps_apart_are_refused_and_computed_on_decode(
    tmp_path: Path,
) -> None:
    model_path = tiny_model("gemma3", tmp_path)
    prompts = PROMPTS[:3]
    expected = generate_reference(model_path, prompts, num_tokens=8)
    with Stack.open(
        model_path,
        model=FLOAT32,
        cache={"memory_gib": 0.05},
        prefill={"cache": {"block_size": 16}},
        decode={"cache": {"block_size": 32}},
    ) as stack:
        answers = run(stack, prompts, 8)
        assert_same(answers, expected, prompts)
        ways = {(answer["sluice"]["path"], answer["sluice"]["recomputed"]) for answer in answers}
        assert ways == {("local", True)}


def test_float8_on_decode_answers_as_conversion_in_one_process_does(tmp_path: Path) -> None:
    model_path = tiny_model("llama", tmp_path)
    expected = [rounded_after_prefill(model_path, prompt, num_tokens=24) for prompt in PROMPTS]
    with Stack.open(
        model_path,
        model=FLOAT32,
        cache={"memory_gib": 0.05},
        decode={"cache": {"kv_dtype": "float8_e4m3"}},
        scheduler={"max_batch_tokens": 64},
    ) as stack:
        answers = run(stack, PROMPTS, 24)
        assert {answer["sluice"]["path"] for answer in answers} == {"disaggregated"}
        assert_same(answers, expected, PROMPTS)
        for worker in ("prefill-0", "decode-0"):
            stack.wait_idle(worker)


@pytest.mark.slow
def test_float8_on_both_answers_as_one_worker_with_float8_does(tmp_path: Path) -> None:
    model_path = tiny_model("llama", tmp_path)
    sections = {
        "model": FLOAT32,
        "cache": {"memory_gib": 0.05, "kv_dtype": "float8_e4m3"},
        "scheduler": {"max_batch_tokens": 64},
    }
    with Stack.open(model_path, deploy={"prefill": 0}, **sections) as stack:
        alone = run(stack, PROMPTS, 24)
    with Stack.open(model_path, **sections) as stack:
        answers = run(stack, PROMPTS, 24)
        assert {answer["sluice"]["path"] for answer in answers} == {"disaggregated"}
    expected = [answer["choices"][0]["token_ids"] for answer in alone]
    assert_same(answers, expected, PROMPTS)


def rounded_after_prefill(model_path: Path, prompt: list[int], *, num_tokens: int) -> list[int]:
    """Return the tokens of a prompt computed in float32, then rounded, then decoded in float8."""
    size, num_blocks = 16, 40
    config = SluiceConfig(
        model=ModelConfig(dtype="float32", device="cpu"), cache=CacheConfig(block_size=size)
    )
    prefill, decode = (
        PagedModel(
            load_model(
                model_path,
                dtype="float32",
                device="cpu",
                attention=config.engine.attention,
                num_threads=1,
            ),
            block_size=size,
            num_blocks=num_blocks,
            kv_dtype=kv_dtype,
            staging_nbytes=2**22,
        )
        for kv_dtype in ("auto", "float8_e4m3")
    )
    outputs = [forward(prefill, prompt, 0)]
    used = prefill.kv_pool.blocks[: -(-len(prompt) // size)]
    decode.kv_pool.staging[: used.numel()] = used.flatten()
    heads = range(prefill.kv_pool.layout.heads_per_group)
    KVConverter(decode.kv_pool).unpack(
        Unpack(
            source=prefill.kv_pool.layout,
            offset=decode.kv_pool.staging_range.start,
            layers=range(prefill.kv_pool.layout.layers_per_group),
            source_heads=heads,
            heads=heads,
            runs=tuple(
                (SlotRun(0, BlockId(at), 0, min(size, len(prompt) - at * size)),)
                for at in range(len(used))
            ),
            digests=(None,) * len(used),
        )
    )
    while len(outputs) < num_tokens:
        outputs.append(forward(decode, outputs[-1:], len(prompt) + len(outputs) - 1))
    return outputs


def forward(model: PagedModel, token_ids: list[int], position: int) -> int:
    """Return the token that follows ``token_ids``, greedily."""
    table = np.arange(model.kv_pool.num_blocks, dtype=np.int32)
    part = SequenceInput(Slot(0), token_ids, position, (table,), sample=True)
    plan = build_plan([part], model.kv_pool.layout, device=torch.device("cpu"))
    return int(model.forward(plan)[0].argmax())
