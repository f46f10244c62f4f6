"""What windows change about blocks, without a model: what stays resident, and what is sent."""

from collections.abc import Sequence

import numpy as np

from bench.figures import Figures
from bench.windows_serving import keep_everything
from blockmgr.block_manager import BlockManager
from blockmgr.window import needed_blocks
from core.ids import Attempt, RequestId
from core.kv_layout import KVLayout

_OWNER = (RequestId("long"), Attempt(1))


def resident_blocks(layout: KVLayout, lengths: Sequence[int]) -> dict[int, list[int]]:
    """Return for each length, ascending, the blocks that each group then holds of one sequence.

    The sequence grows by a token at a time, as in decoding, through the block manager.
    """
    groups = len(layout.groups)
    blocks = BlockManager(
        layout, groups * layout.num_blocks_for(lengths[-1]), fences=True, prefix_caching=False
    )
    blocks.admit(_OWNER, tokens=None, num_cached_tokens=0, num_tokens=1)
    held: dict[int, list[int]] = {}
    for num_tokens in range(1, lengths[-1] + 1):
        blocks.grow(_OWNER, num_tokens)
        step = blocks.dispatch_step([_OWNER])
        blocks.complete_step(step)
        blocks.settle(_OWNER, num_tokens)
        if num_tokens in lengths:
            tables = blocks.block_tables(_OWNER)
            held[num_tokens] = [int(np.count_nonzero(table >= 0)) for table in tables]
    return held


def sent_nbytes(layout: KVLayout, num_tokens: int) -> int:
    """Return the bytes that a prompt of ``num_tokens`` takes from prefill to decode."""
    count = sum(
        len(run)
        for group in layout.groups
        for run in needed_blocks(group, layout.block_size, num_tokens)
    )
    return count * layout.block_nbytes


def transfer_figures(layout: KVLayout, lengths: Sequence[int]) -> dict[str, Figures]:
    """Return per prompt length the bytes sent, with all groups whole and with windows."""
    whole = keep_everything(layout)
    return {
        str(length): {
            "kv_nbytes_whole": sent_nbytes(whole, length),
            "kv_nbytes": sent_nbytes(layout, length),
        }
        for length in lengths
    }
