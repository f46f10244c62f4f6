"""What a worker hands to the engine for one step, and what comes back. Values only."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from core.ids import BlockId, Slot, StepSeq
from core.sampling import SamplingParams, TokenLogprobs

HOLE = -1
"""Block table entry of a position whose block is gone (behind a sliding window)."""


@dataclass(frozen=True, slots=True)
class SlotOpening:
    """Gives ``slot`` to a new sequence; whatever the slot held before is forgotten."""

    slot: Slot
    sampling: SamplingParams
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int] = ()
    """Generated earlier (by another attempt, before a preemption, or by a prefill worker)."""


@dataclass(frozen=True, slots=True)
class SequenceInput:
    """One sequence's part of a step: a prefill chunk or one decode token."""

    slot: Slot
    token_ids: Sequence[int] | None
    """None: one token, the one that the slot sampled last. It never leaves the device."""
    position: int
    """Absolute position of the first token of this part; the KV of all earlier ones exists."""
    block_tables: tuple[NDArray[np.int32], ...]
    """Per KV group: block ids by absolute block index, ``HOLE`` where there is none.

    Covers at least every position of this part. Not changed after the step is submitted.
    """
    sample: bool
    """Whether the last token of this part yields a sampled token."""

    @property
    def num_tokens(self) -> int:
        """Tokens of this part."""
        return 1 if self.token_ids is None else len(self.token_ids)


@dataclass(frozen=True, slots=True)
class StepBatch:
    """One non-empty step."""

    step: StepSeq
    openings: tuple[SlotOpening, ...]
    """Applied before the forward, in order."""
    sequences: tuple[SequenceInput, ...]
    """Each slot at most once."""
    zero_blocks: tuple[BlockId, ...] = ()
    """Cleared before the forward."""
    layer_marks: tuple[int, ...] = ()
    """Layers of the model, ascending: it is reported when each, and all before it, are complete."""

    @property
    def num_tokens(self) -> int:
        """Tokens of all sequences."""
        return sum(sequence.num_tokens for sequence in self.sequences)


@dataclass(frozen=True, slots=True)
class SampledToken:
    """The next token of one sequence."""

    slot: Slot
    token_id: int
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True)
class StepOutput:
    """Result of a completed step: its device work is over, nothing of it will write again."""

    step: StepSeq
    tokens: tuple[SampledToken, ...]
    duration_s: float
