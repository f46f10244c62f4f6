"""Which bytes of two pools belong together, in as few descriptors as possible."""

from collections.abc import Sequence

from core.errors import InternalError
from core.ids import BlockId
from transfer.transport import Extent


def merge_blocks(
    local: Sequence[BlockId], remote: Sequence[BlockId], *, block_nbytes: int
) -> tuple[Extent, ...]:
    """Pair ``local[i]`` with ``remote[i]`` and merge neighbours that are adjacent on both sides.

    Order is kept: a run ends where either side jumps, so a run-length code of both sides.

    Raises:
        InternalError: the sides differ in length.
    """
    if len(local) != len(remote):
        raise InternalError(f"{len(local)} local blocks meet {len(remote)} remote blocks")
    runs: list[tuple[BlockId, BlockId, int]] = []
    for mine, theirs in zip(local, remote, strict=True):
        if runs:
            first_mine, first_theirs, length = runs[-1]
            if mine == first_mine + length and theirs == first_theirs + length:
                runs[-1] = (first_mine, first_theirs, length + 1)
                continue
        runs.append((mine, theirs, 1))
    return tuple(
        Extent(
            local_offset=mine * block_nbytes,
            remote_offset=theirs * block_nbytes,
            nbytes=length * block_nbytes,
        )
        for mine, theirs, length in runs
    )
