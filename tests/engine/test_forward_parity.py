"""Guards the forward: logits that drift from ``transformers`` give plausible, wrong text.

Each family runs mixed batches over scattered blocks, as a worker would: chunks of prompts beside
single tokens of other sequences; logits are held against one full forward without a cache. Every
byte that a sequence may not read is NaN: free blocks, unwritten slots, blocks behind the window.
"""

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM

from core.ids import Slot
from engine.batch import HOLE, SequenceInput
from engine.forward import PagedModel
from engine.loading import load_model
from engine.plan import build_plan
from tests.engine.tiny_models import FAMILIES, make_tiny_model

BLOCK_SIZE = 8
NUM_BLOCKS = 256
POISON = 0xFF
PROMPT_LENS = (90, 41, 7, 23)
SMOLLM2 = Path.home() / ".cache/sluice/models/SmolLM2-135M-Instruct"

ATTENTIONS: tuple[Literal["reference", "native"], ...] = ("reference", "native")


@pytest.fixture(scope="module")
def tiny_folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {family: make_tiny_model(family, root / family) for family in FAMILIES}


def random_sequences(vocab_size: int) -> list[list[int]]:
    rng = np.random.default_rng(1)
    return [rng.integers(3, vocab_size, size=length).tolist() for length in PROMPT_LENS]


@functools.cache
def expected_logits(folder: Path, dtype: torch.dtype) -> list[torch.Tensor]:
    """Return the logits at every position of each of the random sequences."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager")
    sequences = random_sequences(model.config.get_text_config().vocab_size)
    with torch.inference_mode():
        return [model(torch.tensor([token_ids])).logits[0].float() for token_ids in sequences]


class ScatteredTables:
    """Gives each sequence of each group random blocks, and takes back what its window has left."""

    def __init__(self, model: PagedModel, lengths: Sequence[int]) -> None:
        self.pool = model.kv_pool
        self.groups = self.pool.layout.groups
        # The last block stays unowned: it is what a hole (-1) would read as an index.
        order = np.random.default_rng(2).permutation(NUM_BLOCKS - 1).astype(np.int32)
        sizes = [self.pool.layout.num_blocks_for(length) for length in lengths]
        taken = iter(np.split(order, np.cumsum(sizes * len(self.groups))))
        self.tables = [[next(taken) for _ in sizes] for _ in self.groups]
        self.unowned = next(taken)
        self.pool.fill(range(NUM_BLOCKS), POISON)

    def punch_holes(self, sequence: int, position: int) -> None:
        for group, tables in zip(self.groups, self.tables, strict=True):
            if group.window is None:
                continue
            first_kept = max(0, position - group.window + 1) // BLOCK_SIZE
            gone = [block for block in tables[sequence][:first_kept].tolist() if block != HOLE]
            self.pool.fill(gone, POISON)
            tables[sequence][:first_kept] = HOLE

    def of(self, sequence: int) -> tuple[NDArray[np.int32], ...]:
        return tuple(tables[sequence] for tables in self.tables)

    def assert_unowned_untouched(self) -> None:
        for block in [*self.unowned.tolist(), NUM_BLOCKS - 1]:
            assert set(self.pool.bytes_of(block)) == {POISON}


def run_in_parts(
    model: PagedModel, sequences: list[list[int]]
) -> list[tuple[int, int, torch.Tensor]]:
    """Return (sequence, position, logits) of the last token of each part of each step."""
    rng = np.random.default_rng(3)
    tables = ScatteredTables(model, [len(sequence) for sequence in sequences])
    done = [0] * len(sequences)
    results: list[tuple[int, int, torch.Tensor]] = []
    while any(at < len(sequence) for at, sequence in zip(done, sequences, strict=True)):
        parts: list[SequenceInput] = []
        ends: list[tuple[int, int]] = []
        for index, sequence in enumerate(sequences):
            length = int(rng.choice([0, 1, 1, 5, 17, 40]))
            part = sequence[done[index] : done[index] + length]
            if not part:
                continue
            tables.punch_holes(index, done[index])
            parts.append(
                SequenceInput(
                    slot=Slot(index),
                    token_ids=part,
                    position=done[index],
                    block_tables=tables.of(index),
                    sample=True,
                )
            )
            done[index] += len(part)
            ends.append((index, done[index] - 1))
        if parts:
            plan = build_plan(parts, model.kv_pool.layout, device=model.device)
            logits = model.forward(plan)
            results.extend((*end, row) for end, row in zip(ends, logits, strict=True))
    tables.assert_unowned_untouched()
    return results


def load(folder: Path, dtype: Literal["float32", "bfloat16"], attention: str) -> PagedModel:
    loaded = load_model(folder, dtype=dtype, device="cpu", attention=attention)
    torch.set_num_threads(1)  # the kernels keep theirs, which do not spin
    return PagedModel(loaded, block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS)


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("family", FAMILIES)
def test_mixed_batches_give_the_logits_of_transformers_in_float32(
    tiny_folders: dict[str, Path], family: str, attention: str
) -> None:
    model = load(tiny_folders[family], "float32", attention)
    sequences = random_sequences(model.spec.vocab_size)

    results = run_in_parts(model, sequences)

    expected = expected_logits(tiny_folders[family], torch.float32)
    for sequence, position, logits in results:
        torch.testing.assert_close(logits, expected[sequence][position], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("family", FAMILIES)
def test_mixed_batches_stay_near_float32_logits_in_bfloat16(
    tiny_folders: dict[str, Path], family: str, attention: str
) -> None:
    """Rounding differs by implementation, so ours may be as far from the truth as theirs is."""
    model = load(tiny_folders[family], "bfloat16", attention)
    sequences = random_sequences(model.spec.vocab_size)

    results = run_in_parts(model, sequences)

    truth = expected_logits(tiny_folders[family], torch.float32)
    theirs = expected_logits(tiny_folders[family], torch.bfloat16)
    our_error = torch.stack([(row - truth[s][p]).square().mean() for s, p, row in results])
    their_error = torch.stack([(theirs[s][p] - truth[s][p]).square().mean() for s, p, _ in results])
    assert our_error.mean().sqrt() <= 1.25 * their_error.mean().sqrt()


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_mixed_batches_give_the_logits_of_transformers_for_the_default_model(
    attention: str,
) -> None:
    if not SMOLLM2.is_dir():
        pytest.skip(f"the default model is not in {SMOLLM2}")
    model = load(SMOLLM2, "float32", attention)
    sequences = random_sequences(model.spec.vocab_size)

    results = run_in_parts(model, sequences)

    expected = expected_logits(SMOLLM2, torch.float32)
    for sequence, position, logits in results:
        torch.testing.assert_close(logits, expected[sequence][position], rtol=1e-4, atol=1e-3)
