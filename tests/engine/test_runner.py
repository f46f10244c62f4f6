"""A whole engine, from steps to text: what overlap, chunks, batches and migration must not change.

The model is a small random Llama in float32, and the reference is ``transformers`` ``generate``.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from core.errors import InternalError
from core.ids import BlockId, StepSeq
from core.sampling import SamplingParams
from engine.batch import StepBatch
from engine.forward import PagedModel
from engine.loading import load_model
from engine.runner import ModelRunner
from tests.engine.texts import (
    BLOCK_SIZE,
    BLOCKS_PER_SEQUENCE,
    EOS,
    GREEDY,
    MAX_NUM_SEQS,
    NUM_TOKENS,
    SEEDED,
    batches,
    generated,
    ids,
    prompts,
    run,
    text,
)
from tests.engine.tiny_models import make_tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def model(folder: Path) -> PagedModel:
    loaded = load_model(folder, dtype="float32", device="cpu", num_threads=1)
    return PagedModel(loaded, block_size=BLOCK_SIZE, num_blocks=MAX_NUM_SEQS * BLOCKS_PER_SEQUENCE)


@pytest.fixture(scope="module")
def reference(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_greedy_text_equals_generate_whatever_the_chunks_and_the_overlap(
    model: PagedModel, reference: PreTrainedModel, depth: int
) -> None:
    all_prompts = prompts(model, (40, 1, 17, 64, 9))
    texts = [text(slot, prompt, GREEDY) for slot, prompt in enumerate(all_prompts)]
    outputs = run(model, texts, depth=depth)
    assert [ids(output) for output in outputs] == [
        generated(reference, prompt, count=NUM_TOKENS) for prompt in all_prompts
    ]


def test_repetition_penalty_equals_generate(model: PagedModel, reference: PreTrainedModel) -> None:
    (prompt,) = prompts(model, (20,))
    sampling = SamplingParams(
        seed=0,
        max_tokens=40,
        temperature=0.0,
        repetition_penalty=1.5,
        min_tokens=40,
        stop_token_ids=(EOS,),
    )
    expected = generated(reference, prompt, count=40, repetition_penalty=1.5)
    assert ids(run(model, [text(0, prompt, sampling)], count=40, depth=2)[0]) == expected


def test_a_seeded_text_is_the_same_alone_in_a_batch_and_with_overlap(model: PagedModel) -> None:
    (prompt, *others) = prompts(model, (23, 12, 31, 5))
    (alone,) = run(model, [text(0, prompt, SEEDED)], depth=1)
    texts = [
        text(5, prompt, SEEDED),
        text(1, others[0], GREEDY),
        text(2, others[1], SamplingParams(seed=77, max_tokens=99, top_k=3)),
        text(3, others[2], SamplingParams(seed=5, max_tokens=99, temperature=1.5)),
    ]
    together = run(model, texts, chunk=5, depth=2)
    assert ids(together[0]) == ids(alone)


def test_a_seeded_text_goes_on_the_same_from_any_point_on_another_engine(
    model: PagedModel,
) -> None:
    """A preemption, a migration and a first token from a prefill worker all look like this."""
    (prompt,) = prompts(model, (23,))
    (whole,) = run(model, [text(0, prompt, SEEDED)], depth=2)
    for at in (1, 10):
        known = ids(whole)[:at]
        (rest,) = run(model, [text(3, prompt, SEEDED, known)], depth=2)
        assert known + ids(rest) == ids(whole)


def test_a_slot_that_is_reused_forgets_penalties_seed_and_last_token(model: PagedModel) -> None:
    (first, second) = prompts(model, (30, 11))
    expected = run(model, [text(0, second, GREEDY)], depth=1)
    runner = ModelRunner(model, max_num_seqs=MAX_NUM_SEQS)
    outputs: list[int] = []
    for each in (text(0, first, SEEDED), text(0, second, GREEDY)):
        for batch in batches([each], chunk=64, count=NUM_TOKENS):
            outputs += ids(runner.run(batch).tokens)
    assert outputs[NUM_TOKENS:] == ids(expected[0])


def test_logprobs_of_a_step_equal_those_of_transformers(
    model: PagedModel, reference: PreTrainedModel
) -> None:
    (prompt,) = prompts(model, (13,))
    sampling = SamplingParams(
        seed=3, max_tokens=99, temperature=0.5, top_k=4, presence_penalty=1.0, logprobs=5
    )
    (tokens, others) = run(
        model, [text(0, prompt, sampling), text(1, prompt[:4], GREEDY)], count=8, depth=2
    )
    with torch.inference_mode():
        logits = reference(torch.tensor([prompt + ids(tokens)])).logits[0]
    expected = logits[len(prompt) - 1 :].log_softmax(-1)
    for row, token in enumerate(tokens):
        assert token.logprobs is not None
        assert token.logprobs.chosen == pytest.approx(
            expected[row, token.token_id].item(), abs=1e-4
        )
        (values, likeliest) = expected[row].topk(5)
        assert [token_id for token_id, _ in token.logprobs.top] == likeliest.tolist()
        assert [value for _, value in token.logprobs.top] == pytest.approx(
            values.tolist(), abs=1e-4
        )
    assert all(token.logprobs is None for token in others)


def test_named_blocks_are_cleared_before_the_forward(model: PagedModel) -> None:
    (prompt,) = prompts(model, (BLOCK_SIZE - 2,))
    each = text(0, prompt, GREEDY)
    model.kv_pool.fill([0, 1, 2], 7)
    (openings, part) = each.next_part(64)
    batch = StepBatch(
        step=StepSeq(1),
        openings=openings,
        sequences=(part,),
        zero_blocks=(BlockId(0), BlockId(1)),
    )
    ModelRunner(model, max_num_seqs=MAX_NUM_SEQS).run(batch)
    assert set(model.kv_pool.bytes_of(1)) == {0}
    assert set(model.kv_pool.bytes_of(2)) == {7}
    assert model.kv_pool.keys[0][0, len(prompt) - 1].abs().sum() > 0
    assert model.kv_pool.keys[0][0, len(prompt) :].abs().sum() == 0


def test_warming_up_leaves_the_pool_as_it_was(model: PagedModel) -> None:
    model.kv_pool.fill(range(model.kv_pool.num_blocks), 9)
    ModelRunner(model, max_num_seqs=MAX_NUM_SEQS).warm_up()
    assert (model.kv_pool.blocks == 9).all()


def test_a_step_that_samples_nothing_gives_no_tokens(model: PagedModel) -> None:
    (prompt,) = prompts(model, (20,))
    (openings, part) = text(0, prompt, GREEDY).next_part(7)
    batch = StepBatch(step=StepSeq(1), openings=openings, sequences=(part,))
    output = ModelRunner(model, max_num_seqs=MAX_NUM_SEQS).run(batch)
    assert (output.step, output.tokens) == (1, ())


def test_kv_that_is_not_a_number_fails_the_step_instead_of_giving_a_token(
    model: PagedModel,
) -> None:
    """What a read of a poisoned block looks like."""
    (prompt,) = prompts(model, (20,))
    runner = ModelRunner(model, max_num_seqs=MAX_NUM_SEQS)
    steps = batches([text(3, prompt, SEEDED)], chunk=64, count=2)
    runner.run(next(steps))
    model.kv_pool.fill([3 * BLOCKS_PER_SEQUENCE], 0xFF)
    with pytest.raises(InternalError, match=r"NaN logits for slots \[3\]"):
        runner.run(next(steps))
    model.kv_pool.zero([3 * BLOCKS_PER_SEQUENCE])


def _without_opening(model: PagedModel) -> StepBatch:
    (prompt,) = prompts(model, (4,))
    (_, part) = text(0, prompt, GREEDY).next_part(7)
    return StepBatch(step=StepSeq(1), openings=(), sequences=(part,))


def _slot_out_of_range(model: PagedModel) -> StepBatch:
    (prompt,) = prompts(model, (4,))
    (openings, part) = text(MAX_NUM_SEQS, prompt, GREEDY).next_part(7)
    return StepBatch(step=StepSeq(1), openings=openings, sequences=(part,))


@pytest.mark.parametrize("make", [_without_opening, _slot_out_of_range])
def test_a_batch_with_an_unusable_slot_is_refused(
    model: PagedModel, make: Callable[[PagedModel], StepBatch]
) -> None:
    with pytest.raises(InternalError, match="slot"):
        ModelRunner(model, max_num_seqs=MAX_NUM_SEQS).run(make(model))
