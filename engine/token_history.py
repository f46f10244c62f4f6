"""Which tokens a sequence holds, on the device, for the sequences that have penalties.

Per penalised sequence two rows: ``counts`` [vocab], how often a token is in the output, and
``history``, the tokens to look at: the prompt's distinct ones, then every output token. A penalty
so costs a gather of the sequence's own tokens, not passes over the vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from core.ids import Slot

_FIRST_ROWS = 4
_FIRST_COLUMNS = 512


@dataclass(frozen=True, slots=True)
class Penalties:
    """One entry per penalised row of the logits."""

    rows: NDArray[np.int64]
    """Of the logits."""
    slots: NDArray[np.int64]
    num_outputs: NDArray[np.int64]
    """Output tokens before the one to be sampled."""
    repetition: NDArray[np.float32]
    presence: NDArray[np.float32]
    frequency: NDArray[np.float32]


class TokenHistory:
    """Tokens of the open penalised slots. Takes no memory until the first one opens.

    Invariants:
        * a row of the tables belongs to at most one slot;
        * ``history[row, :length]`` are valid token ids, with ``length`` the number of distinct
          prompt tokens plus output tokens; what lies behind is another sequence's past.
    """

    def __init__(self, *, num_slots: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._row_of_slot = np.full(num_slots, -1, np.int64)
        self._num_prompt = np.zeros(num_slots, np.int64)
        self._free_rows: list[int] = []
        self._counts = torch.zeros((0, vocab_size), dtype=torch.int32, device=device)
        self._history = torch.zeros((0, _FIRST_COLUMNS), dtype=torch.int64, device=device)

    @property
    def num_open(self) -> int:
        """Slots that have a row."""
        return len(self._counts) - len(self._free_rows)

    def open(self, slot: Slot, prompt: Sequence[int], output: Sequence[int]) -> None:
        """Keep the tokens of the sequence that ``slot`` was given to, and forget its last one."""
        row = self._row_for(slot)
        outputs = np.asarray(output, np.int64)
        tokens = np.concatenate([np.unique(np.asarray(prompt, np.int64)), outputs])
        self._num_prompt[slot] = len(tokens) - len(outputs)
        self._reserve_columns(len(tokens))
        self._history[row, : len(tokens)] = torch.from_numpy(tokens).to(self._device)
        counts = np.bincount(outputs, minlength=self._vocab_size).astype(np.int32)
        self._counts[row] = torch.from_numpy(counts).to(self._device)

    def close(self, slot: Slot) -> None:
        """Forget the slot's tokens, if it has any."""
        row = int(self._row_of_slot[slot])
        if row >= 0:
            self._row_of_slot[slot] = -1
            self._free_rows.append(row)

    def record(self, penalties: Penalties, tokens: torch.Tensor) -> None:
        """Add the newly sampled token of each penalised row of ``tokens`` [rows]."""
        columns = self._num_prompt[penalties.slots] + penalties.num_outputs
        self._reserve_columns(int(columns.max()) + 1)
        rows = self._to_device(self._row_of_slot[penalties.slots])
        sampled = tokens[self._to_device(penalties.rows)]
        self._history[rows, self._to_device(columns)] = sampled
        self._counts[rows, sampled] += 1

    def apply(self, logits: torch.Tensor, penalties: Penalties) -> None:
        """Change ``logits`` [rows, vocab] in place.

        Repetition divides positive and multiplies negative logits of tokens in prompt or output
        (``transformers``' RepetitionPenaltyLogitsProcessor); frequency subtracts per occurrence in
        the output and presence once (OpenAI API reference, "frequency_penalty").
        """
        slots = penalties.slots
        lengths = self._num_prompt[slots] + penalties.num_outputs
        rows = self._to_device(self._row_of_slot[slots])
        tokens = self._tokens(rows, lengths)
        at = (self._to_device(penalties.rows)[:, None], tokens)
        counts = self._counts[rows[:, None], tokens]
        values = logits[at]
        repetition = self._to_device(penalties.repetition)[:, None]
        values = torch.where(values > 0, values / repetition, values * repetition)
        values -= self._to_device(penalties.frequency)[:, None] * counts
        values -= self._to_device(penalties.presence)[:, None] * (counts > 0)
        # A token that occurs twice is written twice, with one value.
        logits[at] = values

    def _tokens(self, rows: torch.Tensor, lengths: NDArray[np.int64]) -> torch.Tensor:
        """Return [rows, longest] token ids; short rows repeat their first token."""
        tokens = self._history[:, : int(lengths.max())].index_select(0, rows)
        column = torch.arange(tokens.shape[1], device=self._device)
        behind = column >= self._to_device(lengths)[:, None]
        return torch.where(behind, tokens[:, :1], tokens)

    def _row_for(self, slot: Slot) -> int:
        row = int(self._row_of_slot[slot])
        if row < 0:
            if not self._free_rows:
                self._grow_rows()
            row = self._free_rows.pop()
            self._row_of_slot[slot] = row
        return row

    def _grow_rows(self) -> None:
        old = len(self._counts)
        added = max(_FIRST_ROWS, old)
        self._counts = torch.cat([self._counts, self._counts.new_zeros(added, self._vocab_size)])
        columns = self._history.shape[1]
        self._history = torch.cat([self._history, self._history.new_zeros(added, columns)])
        self._free_rows.extend(range(old + added - 1, old - 1, -1))

    def _reserve_columns(self, needed: int) -> None:
        columns = self._history.shape[1]
        if needed > columns:
            added = max(columns, needed - columns)
            more = self._history.new_zeros(len(self._history), added)
            self._history = torch.cat([self._history, more], dim=1)

    def _to_device(self, values: NDArray[np.generic]) -> torch.Tensor:
        return torch.from_numpy(values).to(self._device, non_blocking=True)
