"""A source and one rank of a reader whose blocks differ: real pools, a network of ``memcpy``."""

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import torch

from core.ids import Attempt, BlockId, Generation, Incarnation, OperationId, RequestId
from core.kv_heads import heads_of_rank
from core.kv_layout import KVDtype, KVGroup, KVLayout
from core.messages import Compatibility, GroupBlocks, PieceId
from engine.kv_conversion import KVConverter
from engine.kv_pool import KVPool
from engine.kv_rows import TORCH_DTYPES
from transfer.actions import PostRead
from transfer.conversions import Conversions, Portion
from transfer.extents import LayerSpan
from transfer.pairing import PairPlan, rank_of_source
from transfer.positions import BlockSizes
from transfer.quanta import EndedRead

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
        self.conversions.connect(SOURCE, self.plan)
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
        read = self.make_read(piece, tokens, first_token=first_token)
        self.conversions.add(read, self.plan, 0.0)
        return read

    def make_read(
        self, piece: PieceId, tokens: range, *, first_token: int = 0, has_digests: bool = False
    ) -> PostRead:
        """Return a read of the source's blocks that hold ``tokens``."""
        size = self.theirs.kv_layout.block_size
        first, stop = tokens.start // size, -(-tokens.stop // size)
        named = tuple(
            blocks_of(group, first, table[first:stop])
            for group, table in enumerate(self.table_there)
        )
        if has_digests:
            span = LayerSpan.of_piece(piece, self.theirs.kv_layout)
            named = tuple(
                msgspec.structs.replace(
                    run,
                    digests=self.sources[0].digests(
                        run.block_ids, offset=span.offset, nbytes=span.nbytes
                    ),
                )
                for run in named
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
        return PostRead(
            next(self.operations),
            SOURCE,
            OWNER,
            piece,
            named,
            target,
            first_token=first_token,
            end_token=tokens.stop,
        )

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
