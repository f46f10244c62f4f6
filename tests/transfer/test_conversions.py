"""KV of another shape must end where a direct write would have put it, and nowhere else.

A token in the wrong slot, a head of the wrong layer or a portion that overwrites another's staging
is wrong KV without an error. Sources, network and staging are bytes in this process; the arithmetic
and the unpacking are those of a worker.
"""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from core.ids import Incarnation, OperationId
from core.kv_layout import KVDtype, KVGroup
from core.messages import PieceId
from tests.transfer.shape_pair import (
    ALL_LAYERS,
    HEAD_DIM,
    OWNER,
    SOURCE,
    Pair,
    blocks_of,
    side,
)
from transfer.actions import PostRead
from transfer.conversions import Conversions


@settings(deadline=None, max_examples=80)
@given(
    sizes=st.sampled_from([(2, 2), (4, 2), (8, 2), (2, 4), (2, 8), (12, 4), (4, 4)]),
    heads=st.sampled_from([1, 2, 4, 6]),
    ranks=st.tuples(st.sampled_from([1, 2, 3, 4, 6]), st.sampled_from([1, 2, 3, 4, 6])),
    dtype=st.sampled_from(["bfloat16", "float8_e4m3"]),
    num_tokens=st.integers(1, 40),
    data=st.data(),
)
def test_unpacked_pool_equals_one_that_steps_have_written(
    sizes: tuple[int, int],
    heads: int,
    ranks: tuple[int, int],
    dtype: KVDtype,
    num_tokens: int,
    data: st.DataObject,
) -> None:
    assume(all(heads % n == 0 or n % heads == 0 for n in ranks))
    pair = Pair(
        theirs=side(heads, ranks[0], sizes[0]),
        mine=side(heads, ranks[1], sizes[1], dtype=dtype),
        rank=data.draw(st.integers(0, ranks[1] - 1), label="rank"),
        num_tokens=num_tokens,
        staging_nbytes=data.draw(st.sampled_from([8192, 2**16]), label="staging"),
        seed=data.draw(st.integers(0, 99), label="seed"),
    )
    first_token = data.draw(st.integers(0, (num_tokens - 1) // sizes[1]), label="hit") * sizes[1]
    start = first_token // sizes[0] * sizes[0]
    cuts = range(start + sizes[0], num_tokens, sizes[0])
    chosen = sorted(data.draw(st.sets(st.sampled_from(cuts)) if cuts else st.just(set())))
    bounds = [start, *chosen, num_tokens]
    cut = data.draw(st.integers(1, 3), label="first range of layers")
    ranges = [range(cut), range(cut, 3)] if cut < 3 else [ALL_LAYERS]
    pieces = [
        (PieceId(layers.start, layers.stop - 1, chunk), range(*tokens))
        for chunk, tokens in enumerate(itertools.pairwise(bounds))
        for layers in ranges
    ]
    for piece, tokens in data.draw(st.permutations(pieces)):
        pair.read(piece, tokens, first_token=first_token)
    pair.run()
    assert sorted(end.operation for end in pair.ends) == [*range(1, len(pieces) + 1)]
    assert all(end.failure is None and not end.is_cancelled for end in pair.ends)
    wanted = range(first_token, num_tokens)
    assert torch.equal(pair.pool.blocks, pair.expected(wanted, ALL_LAYERS))


def test_only_the_layers_that_were_read_are_written() -> None:
    pair = Pair(side(2, 1, 4), side(2, 2, 2), rank=1, num_tokens=11)
    pair.read(PieceId(1, 1, 0), range(11))
    pair.run()
    assert torch.equal(pair.pool.blocks, pair.expected(range(11), range(1, 2)))


def test_a_larger_block_gets_its_tokens_from_several_tickets() -> None:
    pair = Pair(side(2, 1, 2), side(2, 1, 8), rank=0, num_tokens=13)
    for chunk, tokens in enumerate([range(2), range(2, 6), range(6, 13)]):
        pair.read(PieceId(0, 2, chunk), tokens)
    pair.run()
    assert torch.equal(pair.pool.blocks, pair.expected(range(13), ALL_LAYERS))


def test_tokens_that_decode_has_already_are_not_written() -> None:
    """Its cached prefix ends within a block of the source, which is read as a whole."""
    pair = Pair(side(2, 1, 8), side(2, 1, 2), rank=0, num_tokens=16)
    read = pair.read(PieceId(0, 2, 0), range(16), first_token=6)
    assert [run.first_index for run in read.target] == [3, 3]
    pair.run()
    assert torch.equal(pair.pool.blocks, pair.expected(range(6, 16), ALL_LAYERS))


def test_windows_of_smaller_blocks_here_take_what_they_need_of_larger_ones_there() -> None:
    groups = (KVGroup((0, 1, 2)), KVGroup((3, 4, 5), window=5, num_sinks=1))
    theirs, mine = side(1, 1, 8, groups=groups), side(1, 1, 2, groups=groups)
    pair = Pair(theirs, mine, rank=0, num_tokens=20)
    sizes = pair.sizes
    named = [blocks_of(1, 0, [7]), blocks_of(1, 2, [9])]
    # Decode reads token 0, and from 20 - 5 + 1 = 16 on
    assert [str(run) for run in sizes.positions_of(named, range(20), end=20)] == [
        "group 1 [0, 1)",
        "group 1 [8, 10)",
    ]
    assert sizes.required_there(1, range(20)) == [0, 2]


@pytest.mark.parametrize("how", ["cancelled", "dropped", "failed"])
def test_b13_nothing_is_unpacked_of_a_receive_that_failed_or_was_aborted(how: str) -> None:
    """And its room is given back when its reads are terminal, not before."""
    pair = Pair(side(4, 1, 4), side(4, 2, 4), rank=0, num_tokens=40, staging_nbytes=4096)
    read = pair.read(PieceId(0, 2, 0), range(40))
    flying = list(iter(pair.conversions.next, None))
    assert len(flying) > 1
    for portion in flying:
        pair.land(portion)
    # When it ends while all of its portions have their bytes, and more are to come
    if how == "cancelled":
        assert pair.conversions.cancel(read.operation) == (
            sorted(portion.operation for portion in flying),
            None,
        )
    elif how == "dropped":
        assert pair.conversions.drop(SOURCE, "gone") == []
    else:
        pair.end(flying.pop(), failure="flushed")
    # Then nothing more is staged, nothing is unpacked, and it ends once, with the last portion
    for portion in flying:
        assert pair.conversions.next() is None
        assert pair.ends == []
        pair.end(portion)
    assert [(end.operation, end.is_cancelled) for end in pair.ends] == [
        (read.operation, how == "cancelled")
    ]
    assert torch.equal(pair.pool.blocks, torch.full_like(pair.pool.blocks, 0x5A))
    assert len(pair.conversions) == 0


def test_b13_mutation_an_unpack_of_what_was_aborted_is_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def regardless(self: Conversions, operation: OperationId) -> object:
        return self._portions[operation].unpacks

    monkeypatch.setattr(Conversions, "landed", regardless)
    with pytest.raises(AssertionError):
        test_b13_nothing_is_unpacked_of_a_receive_that_failed_or_was_aborted("cancelled")


def test_a_read_that_waits_for_room_ends_at_once_when_it_is_cancelled() -> None:
    pair = Pair(side(4, 1, 4), side(4, 2, 4), rank=0, num_tokens=16)
    read = pair.read(PieceId(0, 2, 0), range(16))
    portions, end = pair.conversions.cancel(read.operation)
    assert portions == []
    assert end is not None
    assert end.is_cancelled
    assert pair.conversions.cancel(read.operation) == ([], None)


def test_a_source_that_does_not_answer_leaves_room_for_another() -> None:
    pair = Pair(side(4, 1, 4), side(4, 2, 4), rank=0, num_tokens=400, staging_nbytes=2**14)
    frozen = pair.read(PieceId(0, 2, 0), range(400))
    stuck = list(iter(pair.conversions.next, None))
    assert all(portion.read is frozen for portion in stuck)
    other = PostRead(
        OperationId(99),
        Incarnation("Q"),
        OWNER,
        frozen.piece,
        frozen.source,
        frozen.target,
        first_token=0,
        end_token=400,
    )
    pair.conversions.add(other, pair.plan, 0.0)
    portion = pair.conversions.next()
    assert portion is not None
    assert portion.read is other
    pair.conversions.check_invariants()


def _room_is_left_by(num_frozen: int) -> None:
    """Frozen sources have filled what they may; a healthy one reads on, a block at a time."""
    pair = Pair(side(4, 1, 4), side(4, 2, 4), rank=0, num_tokens=400, staging_nbytes=2**15)
    read = pair.read(PieceId(0, 2, 0), range(400))
    pair.conversions.drop(SOURCE, "gone")
    sources = [Incarnation(f"S{number}") for number in range(num_frozen + 1)]
    for source in sources:
        pair.conversions.connect(source, pair.plan)
    *frozen, healthy = (
        replace(read, operation=OperationId(100 + number), peer=source)
        for number, source in enumerate(sources)
    )
    for each in frozen:
        pair.conversions.add(each, pair.plan, 0.0)
    stuck = list(iter(pair.conversions.next, None))
    pair.conversions.add(healthy, pair.plan, 0.0)
    while not pair.ends:
        portion = pair.conversions.next()
        assert portion is not None, f"{len(stuck)} portions of frozen sources fill the staging"
        assert portion.read is healthy
        pair.end(portion)
    assert [end.operation for end in pair.ends] == [healthy.operation]

    # When they are torn down, all room comes back
    for source in sources:
        pair.conversions.drop(source, "frozen")
    for portion in stuck:
        pair.end(portion)
    assert pair.conversions._staging.is_unused


@pytest.mark.parametrize("num_frozen", [1, 2, 3])
def test_c20_sources_that_do_not_answer_leave_room_for_one_that_does(num_frozen: int) -> None:
    _room_is_left_by(num_frozen)


def test_c20_mutation_without_room_that_is_kept_two_frozen_sources_stop_a_third(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Conversions, "_keep_room", lambda _: None)
    with pytest.raises(AssertionError, match="fill the staging"):
        _room_is_left_by(2)


def test_room_that_was_in_use_when_its_source_was_lost_is_kept_for_the_next_one() -> None:
    pair = Pair(side(4, 1, 4), side(4, 2, 4), rank=0, num_tokens=400, staging_nbytes=2**14)
    pair.conversions.connect(SOURCE, pair.plan)
    frozen = pair.read(PieceId(0, 2, 0), range(400))
    other = replace(frozen, operation=OperationId(99), peer=Incarnation("Q"))
    pair.conversions.add(other, pair.plan, 0.0)
    stuck = list(iter(pair.conversions.next, None))
    assert set(pair.conversions._in_kept) == {SOURCE}
    pair.conversions.drop(SOURCE, "gone")
    pair.conversions.connect(SOURCE, pair.plan)
    pair.conversions.check_invariants()
    pair.conversions.drop(Incarnation("Q"), "gone")
    for portion in stuck:
        pair.end(portion)
    assert set(pair.conversions._kept) == {SOURCE}


def test_float8_rows_are_those_of_a_local_step_bit_for_bit() -> None:
    """Scales and all: ``expected`` is written by what steps write with."""
    pair = Pair(side(2, 1, 4), side(2, 1, 4, dtype="float8_e4m3"), rank=0, num_tokens=30)
    pair.kv *= 100
    pair.sources = [pair._source(0)]
    pair.read(PieceId(0, 2, 0), range(30))
    pair.run()
    assert torch.equal(pair.pool.blocks, pair.expected(range(30), ALL_LAYERS))
    row = np.frombuffer(pair.pool.bytes_of(pair.table[0][0]), dtype=np.uint8)[: HEAD_DIM + 4]
    assert row[HEAD_DIM:].any(), "each row has its scale behind it"
