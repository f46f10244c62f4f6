"""Texts as a worker sees them, the steps that give them, and what ``transformers`` says."""

import queue
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from core.errors import StepFailedError
from core.ids import Slot, StepSeq
from core.sampling import SamplingParams
from engine.batch import SampledToken, SequenceInput, SlotOpening, StepBatch, StepOutput
from engine.executor import StepExecutor
from engine.forward import PagedModel
from engine.runner import ModelRunner

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


def prompts(model: PagedModel, lengths: Sequence[int]) -> list[list[int]]:
    random = np.random.default_rng(5)
    return [random.integers(3, model.spec.vocab_size, length).tolist() for length in lengths]


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
