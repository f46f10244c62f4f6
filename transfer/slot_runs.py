"""Which slots of which blocks a converted read fills. Arithmetic only."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from core.errors import InternalError
from core.ids import BlockId
from core.kv_unpack import SlotRun
from transfer.actions import PostRead


@dataclass(frozen=True, slots=True)
class SourceBlock:
    """A block to read, and where its tokens go."""

    block_id: BlockId
    runs: tuple[SlotRun, ...]
    digest: bytes | None = None
    """Of what is read of it, where the source computes digests."""


def source_blocks(read: PostRead, *, source_size: int, target_size: int) -> list[SourceBlock]:
    """Return the source's blocks that hold something of the target's, in order.

    Just the tokens of ``read`` are in a run: what a local block holds of others stays.

    Args:
        read: What to read.
        source_size: Tokens in a block there.
        target_size: Tokens in a block here.

    Raises:
        InternalError: nothing of a target block would be written.
    """
    targets = {
        (run.group, index): block_id
        for run in read.target
        for index, block_id in enumerate(run.block_ids, start=run.first_index)
    }
    blocks: list[SourceBlock] = []
    filled: set[tuple[int, int]] = set()
    for named in read.source:
        digests = named.digests or itertools.repeat(None)
        for at, (block_id, digest) in enumerate(zip(named.block_ids, digests, strict=False)):
            index = named.first_index + at
            runs: list[SlotRun] = []
            for tokens in _pieces(read, index, source_size=source_size, target_size=target_size):
                place = (named.group, tokens.start // target_size)
                if (target := targets.get(place)) is not None:  # else a window left it behind
                    slots = (tokens.start % source_size, tokens.start % target_size)
                    runs.append(SlotRun(slots[0], target, slots[1], len(tokens)))
                    filled.add(place)
            if runs:
                blocks.append(SourceBlock(block_id, tuple(runs), digest))
    if unfilled := targets.keys() - filled:
        raise InternalError(f"operation {read.operation} brings nothing for {sorted(unfilled)}")
    return blocks


def _pieces(read: PostRead, index: int, *, source_size: int, target_size: int) -> Iterator[range]:
    """Yield the wanted tokens of source block ``index``, cut where local blocks end."""
    at = max(index * source_size, read.first_token)
    stop = min((index + 1) * source_size, read.end_token)
    while at < stop:
        end = min(stop, (at // target_size + 1) * target_size)
        yield range(at, end)
        at = end
