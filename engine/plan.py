"""From the sequences of a step to the index tensors of one flattened forward."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from core.errors import InternalError
from core.kv_layout import KVLayout
from engine.batch import SequenceInput


@dataclass(frozen=True, slots=True)
class ForwardPlan:
    """Where each of T tokens of S sequences goes. All tensors are on the model's device.

    Tokens of one sequence are adjacent, sequences in the order of the step.
    """

    token_ids: torch.Tensor
    """[T] int64. Rows named by ``device_rows`` hold 0 until the caller fills them in place."""
    device_rows: torch.Tensor
    """[D] int64: rows whose token is the one that a slot sampled last."""
    device_slots: torch.Tensor
    """[D] int64: the slots of those rows."""
    positions: torch.Tensor
    """[T] int64, absolute."""
    slot_mappings: tuple[torch.Tensor, ...]
    """Per KV group [T] int64: block id * block_size + offset, where the token's K and V go."""
    block_tables: tuple[torch.Tensor, ...]
    """Per KV group [S, blocks] int32, padded with ``HOLE``."""
    query_starts: torch.Tensor
    """[S + 1] int32: first row of each sequence, and T."""
    kv_lens: torch.Tensor
    """[S] int32: tokens of each sequence including this step's."""
    sample_rows: torch.Tensor
    """[R] int64: rows whose logits are wanted, in the order of the step."""
    host_query_starts: NDArray[np.int64]
    """[S + 1], the same as ``query_starts``, in host memory."""
    host_kv_lens: NDArray[np.int64]
    """[S], the same as ``kv_lens``, in host memory."""

    @property
    def num_tokens(self) -> int:
        """T."""
        return self.token_ids.shape[0]

    @property
    def num_sequences(self) -> int:
        """S."""
        return self.kv_lens.shape[0]


def build_plan(
    sequences: Sequence[SequenceInput], layout: KVLayout, *, device: torch.device
) -> ForwardPlan:
    """Return the plan of one forward over ``sequences``, at least one.

    Raises:
        InternalError: a token would be written to a hole or past its block table.
    """
    lengths = np.array([sequence.num_tokens for sequence in sequences], dtype=np.int64)
    first_positions = np.array([sequence.position for sequence in sequences], dtype=np.int64)
    starts = np.zeros(len(sequences) + 1, dtype=np.int64)
    np.cumsum(lengths, out=starts[1:])
    num_tokens = int(starts[-1])
    sequence_of_row = np.repeat(np.arange(len(sequences)), lengths)
    positions = np.arange(num_tokens) + (first_positions - starts[:-1])[sequence_of_row]
    kv_lens = first_positions + lengths
    slots = np.array([sequence.slot for sequence in sequences], dtype=np.int64)
    on_device = np.array([sequence.token_ids is None for sequence in sequences], dtype=bool)
    sampled = np.array([sequence.sample for sequence in sequences], dtype=bool)

    tables = _block_tables(sequences, layout, kv_lens)
    mappings = [_slot_mapping(table, sequence_of_row, positions, layout) for table in tables]

    def put(array: NDArray[np.generic]) -> torch.Tensor:
        return torch.from_numpy(array).to(device, non_blocking=True)

    return ForwardPlan(
        token_ids=put(_token_ids(sequences, starts)),
        device_rows=put(starts[:-1][on_device]),
        device_slots=put(slots[on_device]),
        positions=put(positions),
        slot_mappings=tuple(put(mapping) for mapping in mappings),
        block_tables=tuple(put(table) for table in tables),
        query_starts=put(starts.astype(np.int32)),
        kv_lens=put(kv_lens.astype(np.int32)),
        sample_rows=put(starts[1:][sampled] - 1),
        host_query_starts=starts,
        host_kv_lens=kv_lens,
    )


def _token_ids(sequences: Sequence[SequenceInput], starts: NDArray[np.int64]) -> NDArray[np.int64]:
    token_ids = np.zeros(starts[-1], dtype=np.int64)
    for index, sequence in enumerate(sequences):
        if sequence.token_ids is not None:
            token_ids[starts[index] : starts[index + 1]] = sequence.token_ids
    return token_ids


def _block_tables(
    sequences: Sequence[SequenceInput], layout: KVLayout, kv_lens: NDArray[np.int64]
) -> list[NDArray[np.int32]]:
    num_blocks = -(-kv_lens // layout.block_size)
    tables: list[NDArray[np.int32]] = []
    for group in range(len(layout.groups)):
        table = np.full((len(sequences), int(num_blocks.max())), -1, dtype=np.int32)
        for index, sequence in enumerate(sequences):
            known = sequence.block_tables[group][: num_blocks[index]]
            table[index, : len(known)] = known
        tables.append(table)
    return tables


def _slot_mapping(
    table: NDArray[np.int32],
    sequence_of_row: NDArray[np.int64],
    positions: NDArray[np.int64],
    layout: KVLayout,
) -> NDArray[np.int64]:
    blocks = table[sequence_of_row, positions // layout.block_size].astype(np.int64)
    if (blocks < 0).any():
        row = int((blocks < 0).argmax())
        raise InternalError(
            f"sequence {int(sequence_of_row[row])} of the step has no block for its "
            f"position {int(positions[row])}"
        )
    return blocks * layout.block_size + positions % layout.block_size
