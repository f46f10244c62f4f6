"""Each rank of decode must get exactly its heads, from ranks that have them.

A head that is read from the wrong place is another head's KV: wrong tokens, and no error.
"""

import msgspec
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from core.kv_heads import heads_of_rank
from core.kv_layout import KVGroup, KVLayout
from core.messages import Compatibility
from transfer.pairing import HeadShare, PairPlan


def side(total: int, num_ranks: int, *, block_size: int = 16) -> Compatibility:
    layout = KVLayout(
        (KVGroup((0, 1)),),
        block_size,
        num_kv_heads=max(1, total // num_ranks),
        head_dim=4,
        dtype="bfloat16",
    )
    return Compatibility(
        model_fingerprint="m",
        tokenizer_fingerprint="t",
        kv_layout=layout,
        total_kv_heads=total,
        model_dtype="bfloat16",
        tensor_parallel_size=num_ranks,
    )


def shares(total: int, ranks_here: int, ranks_there: int, rank: int) -> tuple[HeadShare, ...]:
    return PairPlan.of(side(total, ranks_here), side(total, ranks_there), rank).shares


def test_c16_of_two_heads_on_one_rank_four_ranks_read_one_head_each() -> None:
    """P TP1 with 2 KV heads, D TP4: D ranks 0, 1 read head 0, ranks 2, 3 read head 1."""
    read = [shares(2, 4, 1, rank) for rank in range(4)]
    assert read == [
        (HeadShare(0, range(1), range(1)),),
        (HeadShare(0, range(1), range(1)),),
        (HeadShare(0, range(1, 2), range(1)),),
        (HeadShare(0, range(1, 2), range(1)),),
    ]


def test_c16_copies_share_the_load() -> None:
    """P TP8 and D TP4 with 2 heads: four copies there, two readers each: two of four are read."""
    read = [share.source_rank for rank in range(4) for share in shares(2, 4, 8, rank)]
    assert read == [0, 2, 4, 6]


def test_d09_of_copies_one_is_read_and_the_others_are_not() -> None:
    """P TP4 with 2 KV heads, D TP1: one rank per head is read; Released frees all four."""
    assert shares(2, 1, 4, 0) == (
        HeadShare(0, range(1), range(1)),
        HeadShare(2, range(1), range(1, 2)),
    )


@given(
    total=st.integers(1, 12),
    ranks_here=st.integers(1, 24),
    ranks_there=st.integers(1, 24),
    data=st.data(),
)
def test_c16_every_head_is_read_once_from_a_rank_that_has_it(
    total: int, ranks_here: int, ranks_there: int, data: st.DataObject
) -> None:
    assume(all(total % n == 0 or n % total == 0 for n in (ranks_here, ranks_there)))
    rank = data.draw(st.integers(0, ranks_here - 1))
    here = heads_of_rank(total, rank=rank, num_ranks=ranks_here)
    read: list[tuple[int, int]] = []
    for share in shares(total, ranks_here, ranks_there, rank):
        there = heads_of_rank(total, rank=share.source_rank, num_ranks=ranks_there)
        assert share.source_heads.stop <= len(there), "reads beyond the rank's heads"
        read += zip(
            [here[at] for at in share.heads], [there[at] for at in share.source_heads], strict=True
        )
    assert read == [(head, head) for head in here]


@pytest.mark.parametrize(("ranks_here", "ranks_there"), [(1, 1), (2, 2), (4, 4), (8, 4), (4, 8)])
def test_ranks_with_equal_heads_need_no_conversion(ranks_here: int, ranks_there: int) -> None:
    for rank in range(ranks_here):
        plan = PairPlan.of(side(4, ranks_here), side(4, ranks_there), rank)
        assert plan.is_direct
        assert plan.wire_layer_nbytes * 2 == plan.target.block_nbytes


def test_anything_else_is_converted() -> None:
    mine = side(4, 2)
    others = [
        side(4, 1),
        side(4, 4),
        side(4, 2, block_size=32),
    ]
    assert not any(PairPlan.of(mine, theirs, 0).is_direct for theirs in others)
    rounded = msgspec.structs.replace(mine.kv_layout, dtype="float8_e4m3")
    assert not PairPlan.of(msgspec.structs.replace(mine, kv_layout=rounded), mine, 0).is_direct
