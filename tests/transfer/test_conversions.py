"""KV of another shape must end where a direct write would have put it, and nowhere else.

A token in the wrong slot, a head of the wrong layer or a portion that overwrites another's staging
is wrong KV without an error. Sources, network and staging are bytes in this process; the arithmetic
and the unpacking are those of a worker.
"""

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from core.ids import Attempt, BlockId, Generation, Incarnation, OperationId, RequestId
from core.kv_heads import heads_of_rank
from core.kv_layout import KVDtype, KVGroup, KVLayout
from core.messages import Compatibility, GroupBlocks, PieceId
from engine.kv_conversion import KVConverter
from engine.kv_pool import KVPool
from engine.kv_rows import TORCH_DTYPES
from transfer.actions import PostRead
from transfer.conversions import Conversions, Portion
from transfer.pairing import PairPlan, rank_of_source
from transfer.positions import BlockSizes
from transfer.read_queue import EndedRead

SOURCE = Incarnation("P")
OWNER = (RequestId("r"), Attempt(1))
HEAD_DIM = 4
CPU = torch.device("cpu")
GROUPS = (KVGroup((0, 1, 2)), KVGroup((3, 4, 5)))


def side(
    total_heads: int,
    num_ranks: int,
    block_size: int,
    *,
    dtype: KVDtype = "bfloat16",
    groups: tuple[KVGroup, ...] = GROUPS,
) -> Compatibility:
    return Compatibility(
        model_fingerprint="m",
        tokenizer_fingerprint="t",
        kv_layout=KVLayout(
            groups,
            block_size,
            num_kv_heads=max(1, total_heads // num_ranks),
            head_dim=HEAD_DIM,
            dtype=dtype,
        ),
        total_kv_heads=total_heads,
        model_dtype="bfloat16",
        tensor_parallel_size=num_ranks,
    )


def heads_at(compatibility: Compatibility, rank: int) -> range:
    return heads_of_rank(
        compatibility.total_kv_heads, rank=rank, num_ranks=compatibility.tensor_parallel_size
    )


def write(
    pool: KVPool, table: Sequence[Sequence[int]], kv: torch.Tensor, heads: range, tokens: range
) -> None:
    """Put ``kv`` [groups, layers, 2, tokens, heads, head_dim] where steps would have put it."""
    size = pool.layout.block_size
    slots = torch.tensor([token % size for token in tokens])
    for group, blocks in enumerate(table):
        at = torch.tensor([blocks[token // size] for token in tokens])
        for place, sides in enumerate(zip(pool.key_rows, pool.value_rows, strict=True)):
            for number, rows in enumerate(sides):
                values = kv[group, place, number, tokens.start : tokens.stop]
                rows.store(at, slots, values[:, heads.start : heads.stop])


@dataclass
class Pair:
    """All ranks of a source, and one local rank, over a network of ``memcpy``."""

    theirs: Compatibility
    mine: Compatibility
    rank: int
    num_tokens: int
    staging_nbytes: int = 2**20
    seed: int = 0
    ends: list[EndedRead] = field(default_factory=list[EndedRead])

    def __post_init__(self) -> None:
        rng = self.rng = random.Random(self.seed)
        generator = torch.Generator().manual_seed(self.seed)
        layout, there = self.mine.kv_layout, self.theirs.kv_layout
        shape = (len(layout.groups), layout.layers_per_group, 2, self.num_tokens)
        self.kv = torch.randn(*shape, self.mine.total_kv_heads, HEAD_DIM, generator=generator)
        self.kv = self.kv.to(TORCH_DTYPES["bfloat16"])
        self.num_blocks = 2 * len(layout.groups) * layout.num_blocks_for(self.num_tokens) + 3
        self.pool = KVPool(layout, self.num_blocks, device=CPU, staging_nbytes=self.staging_nbytes)
        self.pool.fill(range(self.num_blocks), 0x5A)
        self.table = self._table(layout, rng)
        self.table_there = self._table(there, rng)
        self.sources = [self._source(rank) for rank in range(self.theirs.tensor_parallel_size)]
        self.plan = PairPlan.of(self.mine, self.theirs, self.rank)
        self.sizes = BlockSizes(there.block_size, layout.block_size, layout.groups)
        self.converter = KVConverter(self.pool)
        self.conversions = Conversions(self.converter.staging)
        self.operations = map(OperationId, itertools.count(1))

    def _table(self, layout: KVLayout, rng: random.Random) -> list[list[int]]:
        count = layout.num_blocks_for(self.num_tokens)
        ids = rng.sample(range(2 * len(layout.groups) * count + 3), len(layout.groups) * count)
        return [ids[at : at + count] for at in range(0, len(ids), count)]

    def _source(self, rank: int) -> KVPool:
        layout = self.theirs.kv_layout
        count = 2 * len(layout.groups) * layout.num_blocks_for(self.num_tokens) + 3
        pool = KVPool(layout, count, device=CPU)
        pool.fill(range(count), 0xFF)  # what no token fills is NaN
        heads = heads_at(self.theirs, rank)
        write(pool, self.table_there, self.kv, heads, range(self.num_tokens))
        return pool

    def read(self, piece: PieceId, tokens: range, *, first_token: int = 0) -> PostRead:
        """Post a read of the source's blocks that hold ``tokens``, a multiple of their size."""
        size = self.theirs.kv_layout.block_size
        first, stop = tokens.start // size, -(-tokens.stop // size)
        named = tuple(
            blocks_of(group, first, table[first:stop])
            for group, table in enumerate(self.table_there)
        )
        wanted = range(first_token, tokens.stop)
        target = tuple(
            blocks_of(
                run.group,
                run.first_index,
                self.table[run.group][run.first_index : run.first_index + run.count],
            )
            for run in self.sizes.positions_of(named, wanted, end=self.num_tokens)
        )
        read = PostRead(
            next(self.operations),
            SOURCE,
            OWNER,
            piece,
            named,
            target,
            first_token=first_token,
            num_tokens=tokens.stop,
        )
        self.conversions.add(read, self.plan, 0.0)
        return read

    def land(self, portion: Portion) -> None:
        """The network's part: staged, whatever will become of it."""
        room = self.pool.staging_range
        for peer, extents in portion.parts:
            (source,) = (
                pool
                for rank, pool in enumerate(self.sources)
                if rank_of_source(SOURCE, rank) == peer
            )
            flat = source.blocks.flatten()
            for local, remote, nbytes in extents.tolist():
                assert local in room
                assert local + nbytes <= room.stop
                assert 0 <= remote <= len(flat) - nbytes, "beyond the source's pool"
                at = local - room.start
                self.pool.staging[at : at + nbytes] = flat[remote : remote + nbytes]

    def end(self, portion: Portion, failure: str | None = None) -> None:
        if failure is None:
            for work in self.conversions.landed(portion.operation):
                self.converter.unpack(work)
        whole = self.conversions.ended(
            EndedRead(portion.operation, SOURCE, 0.0, 1, 1, failure, is_cancelled=False)
        )
        self.conversions.check_invariants()
        if whole is not None:
            self.ends.append(whole)

    def run(self) -> None:
        """Stage and unpack everything, portions ending in any order."""
        flying: list[Portion] = []
        while True:
            while (portion := self.conversions.next()) is not None:
                self.conversions.check_invariants()
                self.land(portion)
                flying.append(portion)
            if not flying:
                assert not len(self.conversions), "nothing in flight, and reads wait"
                return
            self.end(flying.pop(self.rng.randrange(len(flying))))

    def expected(self, tokens: range, layers: range) -> torch.Tensor:
        """Return the pool's bytes if steps had written ``tokens`` in ``layers``."""
        written = KVPool(self.mine.kv_layout, self.num_blocks, device=CPU)
        written.fill(range(self.num_blocks), 0x5A)
        write(written, self.table, self.kv, heads_at(self.mine, self.rank), tokens)
        shape = (self.num_blocks, self.mine.kv_layout.layers_per_group, -1)
        result = torch.full_like(written.blocks, 0x5A).view(shape)
        chosen = slice(layers.start, layers.stop)
        result[:, chosen] = written.blocks.view(shape)[:, chosen]
        return result.view(self.num_blocks, -1)


def blocks_of(group: int, first_index: int, block_ids: Sequence[int]) -> GroupBlocks:
    return GroupBlocks(
        group,
        first_index,
        tuple(map(BlockId, block_ids)),
        tuple(Generation(1) for _ in block_ids),
    )


ALL_LAYERS = range(3)


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
        (PieceId(0, layers.start, layers.stop - 1, chunk), range(*tokens))
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
    pair.read(PieceId(0, 1, 1, 0), range(11))
    pair.run()
    assert torch.equal(pair.pool.blocks, pair.expected(range(11), range(1, 2)))


def test_a_larger_block_gets_its_tokens_from_several_tickets() -> None:
    pair = Pair(side(2, 1, 2), side(2, 1, 8), rank=0, num_tokens=13)
    for chunk, tokens in enumerate([range(2), range(2, 6), range(6, 13)]):
        pair.read(PieceId(0, 0, 2, chunk), tokens)
    pair.run()
    assert torch.equal(pair.pool.blocks, pair.expected(range(13), ALL_LAYERS))


def test_tokens_that_decode_has_already_are_not_written() -> None:
    """Its cached prefix ends within a block of the source, which is read as a whole."""
    pair = Pair(side(2, 1, 8), side(2, 1, 2), rank=0, num_tokens=16)
    read = pair.read(PieceId(0, 0, 2, 0), range(16), first_token=6)
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
    read = pair.read(PieceId(0, 0, 2, 0), range(40))
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
    read = pair.read(PieceId(0, 0, 2, 0), range(16))
    portions, end = pair.conversions.cancel(read.operation)
    assert portions == []
    assert end is not None
    assert end.is_cancelled
    assert pair.conversions.cancel(read.operation) == ([], None)


def test_a_source_that_does_not_answer_leaves_room_for_another() -> None:
    pair = Pair(side(4, 1, 4), side(4, 2, 4), rank=0, num_tokens=400, staging_nbytes=2**14)
    frozen = pair.read(PieceId(0, 0, 2, 0), range(400))
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
        num_tokens=400,
    )
    pair.conversions.add(other, pair.plan, 0.0)
    portion = pair.conversions.next()
    assert portion is not None
    assert portion.read is other
    pair.conversions.check_invariants()


def test_float8_rows_are_those_of_a_local_step_bit_for_bit() -> None:
    """Scales and all: ``expected`` is written by what steps write with."""
    pair = Pair(side(2, 1, 4), side(2, 1, 4, dtype="float8_e4m3"), rank=0, num_tokens=30)
    pair.kv *= 100
    pair.sources = [pair._source(0)]
    pair.read(PieceId(0, 0, 2, 0), range(30))
    pair.run()
    assert torch.equal(pair.pool.blocks, pair.expected(range(30), ALL_LAYERS))
    row = np.frombuffer(pair.pool.bytes_of(pair.table[0][0]), dtype=np.uint8)[: HEAD_DIM + 4]
    assert row[HEAD_DIM:].any(), "each row has its scale behind it"
