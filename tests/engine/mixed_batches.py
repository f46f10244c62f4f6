"""Mixed batches over scattered blocks, as a worker has them, and the logits they must give.

Chunks of prompts run beside single tokens of other sequences. Every byte that a sequence may not
read is NaN: free blocks, unwritten slots, blocks behind the window.
"""

import functools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM

from core.ids import Slot
from engine.batch import HOLE, SequenceInput
from engine.forward import PagedModel
from engine.plan import build_plan

BLOCK_SIZE = 8
NUM_BLOCKS = 256
POISON = 0xFF
PROMPT_LENS = (90, 41, 7, 23)


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
