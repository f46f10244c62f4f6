"""Which blocks a sliding window still needs: arithmetic only, in tokens and absolute indices.

The query at position ``q`` reads positions ``q - window + 1`` to ``q``, and the sinks:

    tokens   0 ........ s ................. q-w+1 ......... q
             [ sinks  ) [      holes      ) [   window      ]
    blocks   [0, sinks) [sinks, first live) [first live, ...)

With ``n`` settled tokens the earliest query that any step in flight or to come can ask is ``n``,
so nothing in front of ``n - window + 1`` is read again. Counting tokens in flight as settled
would release a block that the step in flight still reads.
"""

from core.kv_layout import KVGroup


def num_sink_blocks(group: KVGroup, block_size: int) -> int:
    """Leading blocks that are never behind the window."""
    return -(-group.num_sinks // block_size)


def first_live_block(group: KVGroup, block_size: int, num_settled_tokens: int) -> int:
    """First block that holds a token inside the window, sinks apart; 0 without a window."""
    if group.window is None:
        return 0
    return max(0, num_settled_tokens - group.window + 1) // block_size


def needed_blocks(group: KVGroup, block_size: int, num_settled_tokens: int) -> list[range]:
    """Runs of absolute indices that must be there when ``num_settled_tokens`` are, in order.

    Only blocks that hold settled tokens count. Runs do not overlap, and none is empty.
    """
    num_blocks = -(-num_settled_tokens // block_size)
    first = first_live_block(group, block_size, num_settled_tokens)
    num_sinks = num_sink_blocks(group, block_size)
    if first <= num_sinks:
        return [range(num_blocks)] if num_blocks else []
    runs = [range(min(num_sinks, num_blocks)), range(first, num_blocks)]
    return [run for run in runs if run]
