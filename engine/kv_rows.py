"""K or V of one layer in a pool: what a step and a conversion write, and what attention reads."""

from dataclasses import dataclass

import torch

from core.kv_layout import ITEM_NBYTES, KVLayout
from engine.kv_quantisation import FLOAT8, dequantise, quantise

TORCH_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float8_e4m3": FLOAT8,
}


@dataclass(frozen=True, slots=True)
class KVRows:
    """A view of all blocks. Which block belongs to which group is the block tables' matter."""

    numbers: torch.Tensor
    """[num_blocks, block_size, heads, head_dim] as they are kept."""
    scales: torch.Tensor | None
    """[num_blocks, block_size, heads] float32; None: the numbers are the values."""

    def store(self, blocks: torch.Tensor, offsets: torch.Tensor, values: torch.Tensor) -> None:
        """Keep ``values`` [..., heads, head_dim], in the model's dtype, of one token each.

        ``blocks`` and ``offsets`` [...] are the tokens' blocks, and their slots in these.
        """
        if self.scales is None:
            self.numbers[blocks, offsets] = values
            return
        numbers, scales = quantise(values)
        # As bytes: not every device can index float8.
        self.numbers.view(torch.uint8)[blocks, offsets] = numbers.view(torch.uint8)
        self.scales[blocks, offsets] = scales

    def load(self, blocks: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """Return the values [..., heads, head_dim] of tokens; float32 where they were scaled."""
        if self.scales is None:
            return self.numbers[blocks, offsets]
        numbers = self.numbers.view(torch.uint8)[blocks, offsets].view(FLOAT8)
        return dequantise(numbers, self.scales[blocks, offsets])


def rows_of(
    blocks: torch.Tensor, layout: KVLayout
) -> tuple[tuple[KVRows, ...], tuple[KVRows, ...]]:
    """Return keys and values of ``blocks`` [num_blocks, block_nbytes] uint8.

    Each per layer of a group, by its place there.
    """
    rows = blocks.view(
        len(blocks),
        layout.layers_per_group,
        2,
        layout.block_size,
        layout.heads_per_group,
        layout.row_nbytes,
    )
    numbers_nbytes = layout.head_dim * ITEM_NBYTES[layout.dtype]
    numbers = rows[..., :numbers_nbytes].view(TORCH_DTYPES[layout.dtype])
    scales = (
        rows[..., numbers_nbytes:].view(torch.float32).squeeze(-1) if layout.has_scales else None
    )
    keys, values = (
        tuple(
            KVRows(numbers[:, place, side], None if scales is None else scales[:, place, side])
            for place in range(layout.layers_per_group)
        )
        for side in (0, 1)
    )
    return keys, values
