"""One sequence's share of a step: accounted when it is dispatched, and what its token means."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from core.errors import InternalError
from core.ids import Slot
from core.messages import FinishReason
from decode.sequence import Sequence
from engine.batch import SequenceInput


class Chosen(NamedTuple):
    """The next step computes this many tokens of a sequence, from where it is."""

    sequence: Sequence
    num_tokens: int


@dataclass(frozen=True, slots=True)
class StepPart:
    """``num_tokens`` tokens of ``sequence`` from ``position`` on, in one dispatched step."""

    sequence: Sequence
    slot: Slot
    position: int
    num_tokens: int
    samples: bool

    def as_input(self, block_tables: tuple[NDArray[np.int32], ...]) -> SequenceInput:
        """Return what the engine is handed: token ids where they are known, else the slot's."""
        known = self.position < self.sequence.num_known
        return SequenceInput(
            slot=self.slot,
            token_ids=self.sequence.token_slice(self.position, self.num_tokens) if known else None,
            position=self.position,
            block_tables=block_tables,
            sample=self.samples,
        )


def dispatch_part(chosen: Chosen) -> StepPart:
    """Account the tokens of ``chosen`` as dispatched."""
    sequence, num_tokens = chosen
    if sequence.slot is None:
        raise InternalError(f"{sequence.owner} was scheduled without a slot")
    position = sequence.num_computed
    samples = position + num_tokens >= sequence.num_known
    sequence.num_computed += num_tokens
    sequence.num_sampling += samples
    sequence.num_steps_in_flight += 1
    return StepPart(sequence, sequence.slot, position, num_tokens, samples)


def finish_reason_of(sequence: Sequence) -> FinishReason | None:
    """Return why the last output token ends the sequence; None: it goes on."""
    sampling, outputs = sequence.sampling, sequence.output_token_ids
    if outputs[-1] in sampling.stop_token_ids and len(outputs) > sampling.min_tokens:
        return "stop"
    return "length" if len(outputs) >= sampling.max_tokens else None
