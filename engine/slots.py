"""What the engine keeps per sequence between steps: its last token and how to sample the next."""

import numpy as np
import torch
from numpy.typing import NDArray

from core.errors import InternalError
from engine.batch import SlotOpening
from engine.counter_random import uniforms
from engine.sampler import SamplingRows
from engine.token_history import Penalties, TokenHistory

_LOWEST_TEMPERATURE = 1e-5
"""Below it, dividing by the temperature overflows and the likeliest token is all that is left."""

_COLUMNS = np.dtype(
    [
        ("is_open", np.bool_),
        ("seed", np.uint64),
        ("prompt_len", np.int64),
        ("min_tokens", np.int64),
        ("temperature", np.float32),
        ("top_k", np.int64),
        ("top_p", np.float64),
        ("min_p", np.float32),
        ("repetition_penalty", np.float32),
        ("presence_penalty", np.float32),
        ("frequency_penalty", np.float32),
        ("has_penalties", np.bool_),
        ("wants_logprobs", np.bool_),
        ("num_top_logprobs", np.int64),
    ]
)


class SlotTable:
    """The slots of one engine. Only the engine thread touches it.

    How many output tokens a sequence has is not counted but follows from the position of the token
    to be sampled, so steps in flight cannot make it wrong.
    """

    def __init__(self, *, num_slots: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._columns = np.zeros(num_slots, _COLUMNS)
        self._stop_ids: dict[int, NDArray[np.int64]] = {}
        self.history = TokenHistory(num_slots=num_slots, vocab_size=vocab_size, device=device)
        self.last_tokens = torch.zeros(num_slots, dtype=torch.int64, device=device)
        """[num_slots]: the token that each slot sampled last, or that its sequence came with."""

    def open(self, opening: SlotOpening) -> None:
        """Give the slot to a new sequence; whatever it held before is forgotten.

        Raises:
            InternalError: there is no such slot, or the sequence has no prompt.
        """
        (slot, sampling) = (opening.slot, opening.sampling)
        if not 0 <= slot < len(self._columns) or not len(opening.prompt_token_ids):
            raise InternalError(
                f"slot {slot} of {len(self._columns)} opened with a prompt of "
                f"{len(opening.prompt_token_ids)} tokens"
            )
        is_greedy = sampling.temperature < _LOWEST_TEMPERATURE
        top_k = sampling.top_k if 0 < sampling.top_k < self._vocab_size else self._vocab_size
        self._columns[slot] = (
            True,
            np.uint64(sampling.seed & 0xFFFF_FFFF_FFFF_FFFF),
            len(opening.prompt_token_ids),
            sampling.min_tokens if sampling.stop_token_ids else 0,
            0.0 if is_greedy else sampling.temperature,
            top_k,
            sampling.top_p,
            sampling.min_p,
            sampling.repetition_penalty,
            sampling.presence_penalty,
            sampling.frequency_penalty,
            sampling.has_penalties,
            sampling.logprobs is not None,
            sampling.logprobs or 0,
        )
        stop_ids = np.array(sampling.stop_token_ids, np.int64)
        self._stop_ids[slot] = stop_ids[stop_ids < self._vocab_size]
        known = opening.output_token_ids or opening.prompt_token_ids
        self.last_tokens[slot] = known[-1]
        if sampling.has_penalties:
            self.history.open(slot, opening.prompt_token_ids, opening.output_token_ids)
        else:
            self.history.close(slot)

    def rows(self, slots: NDArray[np.int64], positions: NDArray[np.int64]) -> SamplingRows:
        """Return how to sample the tokens at absolute ``positions`` of the sequences in ``slots``.

        Raises:
            InternalError: a slot was never opened.
        """
        columns = self._columns[slots]
        if not columns["is_open"].all():
            raise InternalError(f"step samples for a slot that was never opened: {slots.tolist()}")
        num_outputs = positions - columns["prompt_len"]
        return SamplingRows(
            temperature=columns["temperature"],
            top_k=columns["top_k"],
            top_p=columns["top_p"],
            min_p=columns["min_p"],
            uniform=uniforms(columns["seed"], positions),
            penalties=_penalties(columns, slots, num_outputs),
            banned=self._banned(columns, slots, num_outputs),
        )

    def logprobs_wanted(
        self, slots: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the rows whose log-probabilities are wanted, and how many likeliest beside."""
        columns = self._columns[slots]
        (rows,) = np.nonzero(columns["wants_logprobs"])
        return rows, columns["num_top_logprobs"][rows]

    def record(self, slots: torch.Tensor, rows: SamplingRows, tokens: torch.Tensor) -> None:
        """Keep the sampled ``tokens`` as the slots' last ones. Nothing leaves the device."""
        self.last_tokens[slots] = tokens
        if rows.penalties is not None:
            self.history.record(rows.penalties, tokens)

    def _banned(
        self, columns: np.ndarray, slots: NDArray[np.int64], num_outputs: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]] | None:
        (rows,) = np.nonzero(num_outputs < columns["min_tokens"])
        if not len(rows):
            return None
        ids = [self._stop_ids[int(slots[row])] for row in rows]
        return np.repeat(rows, [len(each) for each in ids]), np.concatenate(ids)


def _penalties(
    columns: np.ndarray, slots: NDArray[np.int64], num_outputs: NDArray[np.int64]
) -> Penalties | None:
    (rows,) = np.nonzero(columns["has_penalties"])
    if not len(rows):
        return None
    return Penalties(
        rows=rows,
        slots=slots[rows],
        num_outputs=num_outputs[rows],
        repetition=columns["repetition_penalty"][rows],
        presence=columns["presence_penalty"][rows],
        frequency=columns["frequency_penalty"][rows],
    )
