"""Merged descriptors move exactly the bytes that block-by-block copies would."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.errors import InternalError
from core.ids import BlockId, Generation
from core.messages import GroupBlocks
from transfer.extents import LayerSpan, merge_pairs, pair_positions

NBYTES = 4
WHOLE = LayerSpan(block_nbytes=NBYTES, offset=0, nbytes=NBYTES)

Pairs = list[tuple[BlockId, BlockId]]


def rows(chosen: Pairs) -> np.ndarray:
    return np.array(chosen, dtype=np.int64).reshape(-1, 2)


@st.composite
def pairs(draw: st.DrawFn) -> Pairs:
    """Runs that are often adjacent on one side, the other, or both."""
    local = draw(st.permutations(range(12)))
    remote = draw(st.permutations(range(12)))
    count = draw(st.integers(0, 12))
    if draw(st.booleans()):
        local = sorted(local)
    if draw(st.booleans()):
        remote = sorted(remote)
    return [(BlockId(a), BlockId(b)) for a, b in list(zip(local, remote, strict=True))[:count]]


@given(pairs(), st.integers(0, 3), st.integers(1, 4))
def test_merging_changes_no_byte(chosen: Pairs, offset: int, size: int) -> None:
    span = LayerSpan(NBYTES, min(offset, NBYTES - 1), min(size, NBYTES - min(offset, NBYTES - 1)))
    theirs = np.arange(12 * NBYTES, dtype=np.uint8) + 1
    merged, single = np.zeros(12 * NBYTES, np.uint8), np.zeros(12 * NBYTES, np.uint8)
    for at, source, nbytes in merge_pairs(rows(chosen), span):
        merged[at : at + nbytes] = theirs[source : source + nbytes]
    for local, remote in chosen:
        at, source = local * NBYTES + span.offset, remote * NBYTES + span.offset
        single[at : at + span.nbytes] = theirs[source : source + span.nbytes]
    assert (merged == single).all()


@given(pairs())
def test_runs_on_both_sides_are_one_descriptor_and_no_more(chosen: Pairs) -> None:
    breaks = sum((b[0], b[1]) != (a[0] + 1, a[1] + 1) for a, b in itertools.pairwise(chosen))
    assert len(merge_pairs(rows(chosen), WHOLE)) == (breaks + 1 if chosen else 0)


def run(group: int, first_index: int, *ids: int) -> GroupBlocks:
    lives = tuple(Generation(1) for _ in ids)
    return GroupBlocks(group, first_index, tuple(map(BlockId, ids)), lives)


def test_positions_pair_across_runs_of_different_cuts() -> None:
    source = [run(0, 4, 10, 11, 12), run(1, 4, 20)]
    target = [run(1, 4, 7), run(0, 6, 3), run(0, 4, 1, 2)]
    assert pair_positions(source, target).tolist() == [[7, 20], [3, 12], [1, 10], [2, 11]]


@pytest.mark.parametrize(
    "target",
    [
        [run(0, 0, 1, 2, 3)],
        [run(0, 4, 1, 2)],
        [run(0, 4, 1, 2, 3, 4)],
        [run(1, 4, 1, 2, 3)],
        [run(0, 4, 1, 2, 3), run(0, 4, 9)],
    ],
)
def test_targets_that_do_not_match_are_refused(target: list[GroupBlocks]) -> None:
    with pytest.raises(InternalError, match="ticket covers"):
        pair_positions([run(0, 4, 10, 11, 12)], target)
