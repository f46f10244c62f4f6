"""A whole engine, from steps to text: what overlap, chunks, batches and migration must not change.

The model is a small random Llama in float32, and the reference is ``transformers`` ``generate``.
"""

import queue
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, PreTrainedModel

from core.errors import InternalError, StepFailedError
from core.ids import BlockId, Slot, StepSeq
from core.sampling import SamplingParams
from engine.batch import SampledToken, SequenceInput, SlotOpening, StepBatch, StepOutput
from engine.executor import StepExecutor
from engine.forward import PagedModel
from engine.loading import load_model
from engine.runner import ModelRunner
from tests.engine.tiny_models import make_tiny_model

BLOCK_SIZE = 8
BLOCKS_PER_SEQUENCE = 16
MAX_NUM_SEQS = 6
NUM_TOKENS = 24
DEADLINE_S = 60.0
EOS = 2
GREEDY = SamplingParams(
    seed=0, max_tokens=NUM_TOKENS, temperature=0.0, min_tokens=NUM_TOKENS, stop_token_ids=(EOS,)
)
SEEDED = SamplingParams(
    seed=77, max_tokens=NUM_TOKENS, temperature=1.2, top_p=0.95, repetition_penalty=1.3
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def model(folder: Path) -> PagedModel:
    loaded = load_model(folder, dtype="float32", device="cpu", num_threads=1)
    return PagedModel(loaded, block_size=BLOCK_SIZE, num_blocks=MAX_NUM_SEQS * BLOCKS_PER_SEQUENCE)


def prompts(model: PagedModel, lengths: Sequence[int]) -> list[list[int]]:
    random = np.random.default_rng(5)
    return [random.integers(3, model.spec.vocab_size, length).tolist() for length in lengths]


@pytest.fixture(scope="module")
def reference(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def generated(
    reference: PreTrainedModel, prompt: list[int], *, count: int, repetition_penalty: float = 1.0
) -> list[int]:
    output = reference.generate(
        torch.tensor([prompt]),
        max_new_tokens=count,
        min_new_tokens=count,
        do_sample=False,
        repetition_penalty=repetition_penalty,
    )
    return output[0, len(prompt) :].tolist()


@dataclass
class Text:
    """One sequence as a worker sees it, in a slot of its own and with blocks of its own."""

    slot: Slot
    prompt: list[int]
    sampling: SamplingParams
    output: list[int]
    computed: int = 0
    """Tokens whose part has been put into a step."""

    @property
    def tables(self) -> tuple[NDArray[np.int32], ...]:
        start = self.slot * BLOCKS_PER_SEQUENCE
        return (np.arange(start, start + BLOCKS_PER_SEQUENCE, dtype=np.int32),)

    def next_part(self, chunk: int) -> tuple[tuple[SlotOpening, ...], SequenceInput]:
        known = [*self.prompt, *self.output]
        opening = SlotOpening(self.slot, self.sampling, self.prompt, tuple(self.output))
        at = self.computed
        end = min(at + chunk, len(known))
        tokens = known[at:end] if at < len(known) else None
        self.computed = at + (len(tokens) if tokens else 1)
        part = SequenceInput(
            slot=self.slot,
            token_ids=tokens,
            position=at,
            block_tables=self.tables,
            sample=self.computed >= len(known),
        )
        return (opening,) if at == 0 else (), part


def text(
    slot: int, prompt: list[int], sampling: SamplingParams, output: Sequence[int] = ()
) -> Text:
    return Text(Slot(slot), prompt, sampling, list(output))


def batches(texts: Sequence[Text], *, chunk: int, count: int) -> Iterator[StepBatch]:
    """Yield steps, none of which needs another's output, until all texts have ``count`` tokens.

    Each starts a step after the one before, so prefill chunks meet decode tokens.
    """
    targets = [len(each.prompt) + count - 1 for each in texts]
    step = 0
    while any(each.computed < target for each, target in zip(texts, targets, strict=True)):
        step += 1
        parts = [
            each.next_part(chunk)
            for at, (each, target) in enumerate(zip(texts, targets, strict=True))
            if at < step and each.computed < target
        ]
        yield StepBatch(
            step=StepSeq(step),
            openings=tuple(opening for openings, _ in parts for opening in openings),
            sequences=tuple(part for _, part in parts),
        )


def run(
    model: PagedModel, texts: Sequence[Text], *, chunk: int = 7, count: int = NUM_TOKENS, depth: int
) -> list[list[SampledToken]]:
    """Run to the end with ``depth`` steps submitted ahead; return each text's sampled tokens."""
    reports: queue.Queue[StepOutput | StepFailedError] = queue.Queue()
    runner = ModelRunner(model, max_num_seqs=MAX_NUM_SEQS)
    executor = StepExecutor(runner, lambda _, result: reports.put(result))
    tokens: dict[Slot, list[SampledToken]] = {each.slot: [] for each in texts}

    def collect() -> None:
        result = reports.get(timeout=DEADLINE_S)
        if isinstance(result, StepFailedError):
            raise result
        for token in result.tokens:
            tokens[token.slot].append(token)

    in_flight = 0
    for batch in batches(texts, chunk=chunk, count=count):
        executor.submit(batch)
        in_flight += 1
        if in_flight == depth:
            collect()
            in_flight -= 1
    for _ in range(in_flight):
        collect()
    executor.close(timeout_s=DEADLINE_S)
    return [tokens[each.slot] for each in texts]


def ids(tokens: Sequence[SampledToken]) -> list[int]:
    return [token.token_id for token in tokens]


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
