"""Which bytes of two pools belong together, in as few descriptors as possible."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from core.errors import InternalError
from core.ids import BlockId
from core.kv_layout import KVLayout
from core.messages import GroupBlocks, PieceId
from transfer.actions import PostRead
from transfer.transport import FEW_ROWS, ExtentRows

Pairs: TypeAlias = NDArray[np.int64]
"""[n, 2]: the local and the remote block that hold the same position."""
_FIRST = np.ones(1, dtype=np.bool_)


@dataclass(frozen=True, slots=True)
class LayerSpan:
    """The same bytes of every block: the whole block, or a range of its layers."""

    block_nbytes: int
    offset: int
    nbytes: int

    @classmethod
    def of_piece(cls, piece: PieceId, layout: KVLayout) -> "LayerSpan":
        """Return what ``piece`` covers of each of its blocks."""
        return cls(
            block_nbytes=layout.block_nbytes,
            offset=piece.first_layer * layout.layer_nbytes,
            nbytes=(piece.last_layer - piece.first_layer + 1) * layout.layer_nbytes,
        )

    @property
    def is_whole(self) -> bool:
        """Whether adjacent blocks have adjacent spans."""
        return self.nbytes == self.block_nbytes


def extents_of(read: PostRead, layout: KVLayout) -> ExtentRows:
    """Return what ``read`` moves between two pools of one ``layout``.

    Raises:
        InternalError: its source and its target do not cover the same positions.
    """
    pairs = pair_positions(read.source, read.target)
    return merge_pairs(pairs, LayerSpan.of_piece(read.piece, layout))


def pair_positions(source: Sequence[GroupBlocks], target: Sequence[GroupBlocks]) -> Pairs:
    """Return (local, remote) blocks that hold the same positions, by *absolute* block index.

    Raises:
        InternalError: the two do not cover the same positions, each once. Pairing them in order,
            as if the first of each belonged together, would put KV at wrong positions.
    """
    if [_place(run) for run in source] == [_place(run) for run in target]:
        ids = [[block for run in side for block in run.block_ids] for side in (target, source)]
        return np.array(ids, dtype=np.int64).T
    remote_of = dict(_positions(source))
    pairs = [(local, remote_of.pop(position, None)) for position, local in _positions(target)]
    matched = [(local, remote) for local, remote in pairs if remote is not None]
    if remote_of or len(matched) != len(pairs):
        raise InternalError(
            f"ticket covers {describe_places(source)}, memory was allocated for "
            f"{describe_places(target)}"
        )
    return np.array(matched, dtype=np.int64).reshape(-1, 2)


def merge_pairs(pairs: Pairs, span: LayerSpan) -> ExtentRows:
    """Return extents for ``span`` of each (local, remote) pair.

    Order is kept. Whole blocks that follow each other on *both* sides become one extent.
    """
    if len(pairs) <= FEW_ROWS:
        return _merge_few(pairs, span)
    if span.is_whole:
        follows = (pairs[1:] - pairs[:-1] == 1).all(axis=1)
        firsts = np.flatnonzero(np.concatenate((_FIRST, ~follows)))
    else:
        firsts = np.arange(len(pairs))
    ends = np.empty_like(firsts)
    ends[:-1], ends[-1:] = firsts[1:], len(pairs)
    rows = np.empty((len(firsts), 3), dtype=np.int64)
    rows[:, :2] = pairs[firsts] * span.block_nbytes + span.offset
    rows[:, 2] = (ends - firsts) * span.nbytes
    return rows


def _merge_few(pairs: Pairs, span: LayerSpan) -> ExtentRows:
    """Return what ``merge_pairs`` does, for as many pairs as a loop is faster for."""
    size, offset, nbytes = span.block_nbytes, span.offset, span.nbytes
    rows: list[list[int]] = []
    next_local = next_remote = -1
    for local, remote in pairs.tolist():
        if local == next_local and remote == next_remote:
            rows[-1][2] += nbytes
        else:
            rows.append([local * size + offset, remote * size + offset, nbytes])
        if span.is_whole:
            next_local, next_remote = local + 1, remote + 1
    return np.array(rows, dtype=np.int64).reshape(-1, 3)


def _place(run: GroupBlocks) -> tuple[int, int, int]:
    return run.group, run.first_index, len(run.block_ids)


def _positions(blocks: Sequence[GroupBlocks]) -> Iterator[tuple[tuple[int, int], BlockId]]:
    """Yield ((group, absolute index), block)."""
    for run in blocks:
        for index, block_id in enumerate(run.block_ids, start=run.first_index):
            yield (run.group, index), block_id


def describe_places(blocks: Sequence[GroupBlocks]) -> str:
    """Return the positions of ``blocks`` in words."""
    return ", ".join(
        f"group {run.group} [{run.first_index}, {run.first_index + len(run.block_ids)})"
        for run in blocks
    )
