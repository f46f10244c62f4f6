"""A converted read over a hostile network: unpacked when all is here, and never afterwards."""

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest
import torch

from core.config import TransferConfig
from core.errors import HandshakeError, TransferError
from core.ids import OperationId
from core.messages import PieceId, PoolEndpoint, Welcome
from tests.transfer.adversary import AdversaryNic, Network
from tests.transfer.shape_pair import ALL_LAYERS, SOURCE, Pair, side
from transfer.actions import PostRead
from transfer.pairing import rank_of_source
from transfer.rank_reads import RankReads
from transfer.reads import ReadEnd
from transfer.stats import TransferStats
from transfer.transport import Extents

WHOLE = PieceId(0, 2, 0)


class Reader:
    """One rank's reads, its pool behind a NIC, paired with every rank of the source."""

    def __init__(self, pair: Pair) -> None:
        network = Network()
        self.pair = pair
        self.nic = AdversaryNic(network)
        self.nic.register(pair.pool.address, pair.pool.registered_nbytes)
        self.sources = [AdversaryNic(network) for _ in pair.sources]
        for nic, pool in zip(self.sources, pair.sources, strict=True):
            nic.register(pool.address, pool.registered_nbytes)
        self.ends: list[ReadEnd] = []
        self.begun: list[OperationId] = []
        self.reads = RankReads(
            self.nic,
            compatibility=pair.mine,
            rank=pair.rank,
            scratch_offset=pair.pool.nbytes,
            config=TransferConfig(),
            stats=TransferStats(),
            on_end=self.ends.append,
            on_begun=self.begun.append,
            converter=pair.converter,
        )
        self.welcome = Welcome(
            "P", SOURCE, tuple(nic.endpoint() for nic in self.sources), pair.theirs
        )
        self.reads.connect(SOURCE, self.welcome)

    def post(self, tokens: range, *, has_digests: bool = False) -> PostRead:
        read = self.pair.make_read(WHOLE, tokens, has_digests=has_digests)
        self.reads.post(read)
        return read

    async def until(self, is_true: Callable[[], bool]) -> None:
        for _ in range(10_000):
            if is_true():
                return
            await asyncio.sleep(0)
        pytest.fail("it does not come")

    async def until_ended(self, *, lands: bool = True) -> ReadEnd:
        def is_over() -> bool:
            if lands:
                self.nic.finish()
            return bool(self.ends)

        await self.until(is_over)
        (end,) = self.ends
        return end

    @property
    def is_untouched(self) -> bool:
        return bool((self.pair.pool.blocks == 0x5A).all())


MakeReader = Callable[[Pair], Reader]


@pytest.fixture
async def make_reader() -> AsyncIterator[MakeReader]:
    made: list[Reader] = []

    def make(pair: Pair) -> Reader:
        made.append(Reader(pair))
        return made[-1]

    yield make
    for reader in made:
        reader.reads.close()
        assert reader.nic.peers == {}


async def test_d09_heads_of_several_ranks_there_are_one_read_here(make_reader: MakeReader) -> None:
    """P TP4 with 2 KV heads, D TP1: copies are not read, and the read ends once."""
    reader = make_reader(Pair(side(2, 4, 4), side(2, 1, 2), rank=0, num_tokens=29))
    assert set(reader.nic.peers) == {SOURCE, rank_of_source(SOURCE, 2)}
    read = reader.post(range(29))
    end = await reader.until_ended()
    assert (end.operation, end.peer, end.failure) == (read.operation, SOURCE, None)
    assert reader.begun == [read.operation], "once, however many portions it has"
    assert torch.equal(reader.pair.pool.blocks, reader.pair.expected(range(29), ALL_LAYERS))
    blocks = 2 * 8  # groups, and blocks of each there
    assert end.nbytes == blocks * 2 * reader.pair.theirs.kv_layout.block_nbytes


async def test_b13_a_read_that_is_torn_down_unpacks_nothing_and_gives_its_staging_back(
    make_reader: MakeReader,
) -> None:
    # Given a frozen source, and a staging that one read fills
    pair = Pair(side(4, 2, 4), side(4, 1, 4), rank=0, num_tokens=80, staging_nbytes=4096)
    reader = make_reader(pair)
    reader.post(range(80))
    await reader.until(lambda: bool(reader.nic.pending))
    # When it is torn down in the middle of a portion
    reader.nic.step()
    reader.reads.tear_down(SOURCE, "frozen")
    end = await reader.until_ended(lands=False)
    # Then the read has failed, nothing of it is in a block, and the same room serves the next
    assert end.failure == "frozen"
    assert reader.is_untouched
    assert reader.nic.pending == {}
    reader.ends.clear()
    reader.reads.connect(SOURCE, reader.welcome)
    reader.post(range(80))
    assert (await reader.until_ended()).failure is None
    assert torch.equal(pair.pool.blocks, pair.expected(range(80), ALL_LAYERS))


async def test_b13_a_read_that_is_cancelled_is_not_unpacked(make_reader: MakeReader) -> None:
    pair = Pair(side(4, 1, 4), side(4, 2, 4), rank=1, num_tokens=80, staging_nbytes=4096)
    reader = make_reader(pair)
    read = reader.post(range(80))
    await reader.until(lambda: bool(reader.nic.pending))
    reader.reads.cancel(read.operation)
    assert reader.ends == [], "what is posted is not over"
    end = await reader.until_ended()
    assert end.is_cancelled
    assert end.failure is None
    assert reader.is_untouched


async def test_i07_what_was_staged_is_compared_before_it_is_unpacked(
    make_reader: MakeReader,
) -> None:
    pair = Pair(side(2, 1, 8), side(2, 1, 2), rank=0, num_tokens=16)
    reader = make_reader(pair)
    reader.post(range(16), has_digests=True)
    assert (await reader.until_ended()).failure is None
    assert torch.equal(pair.pool.blocks, pair.expected(range(16), ALL_LAYERS))

    # Given the same again, with a bit that flips on the way
    pair.pool.fill(range(pair.num_blocks), 0x5A)
    reader.ends.clear()
    reader.post(range(16), has_digests=True)
    pair.sources[0].blocks[pair.table_there[1][1], 3] ^= 1
    end = await reader.until_ended()
    # Then the read says so, nothing is unpacked, and the source is still connected
    assert end.is_damaged
    assert end.failure is not None
    assert reader.is_untouched
    assert reader.nic.is_connected(SOURCE)


async def test_one_failed_rank_of_the_source_fails_the_read_once(make_reader: MakeReader) -> None:
    pair = Pair(side(4, 4, 4), side(4, 1, 4), rank=0, num_tokens=16)
    reader = make_reader(pair)
    reader.post(range(16))
    await reader.until(lambda: len(reader.nic.pending) == 4)
    reader.nic.kill(rank_of_source(SOURCE, 3))
    end = await reader.until_ended()
    assert end.failure is not None
    assert reader.is_untouched


async def test_c15_a_staging_that_holds_no_block_is_refused_with_the_fix() -> None:
    pair = Pair(side(2, 1, 64), side(2, 1, 32), rank=0, num_tokens=64, staging_nbytes=1024)
    with pytest.raises(HandshakeError, match=r"bytes of staging.*raise transfer\.staging_mib"):
        Reader(pair)


async def test_what_has_one_shape_is_not_staged(make_reader: MakeReader) -> None:
    """And costs what it did: the bytes go straight into the blocks."""
    pair = Pair(side(2, 1, 4), side(2, 1, 4), rank=0, num_tokens=16, staging_nbytes=0)
    reader = make_reader(pair)
    targets: list[int] = []
    nic_read = reader.nic.read

    def read(peer: str, extents: Extents) -> object:
        targets.extend(row[0] for row in extents)  # type: ignore[index]
        return nic_read(peer, extents)  # type: ignore[arg-type]

    reader.nic.read = read  # type: ignore[method-assign, assignment]
    reader.post(range(16))
    assert (await reader.until_ended()).failure is None
    assert max(targets) < pair.pool.nbytes
    assert torch.equal(
        pair.pool.blocks[torch.tensor(pair.table).flatten()],
        pair.sources[0].blocks[torch.tensor(pair.table_there).flatten()],
    )


async def test_a_pair_that_fails_half_way_leaves_nothing_connected(make_reader: MakeReader) -> None:
    reader = make_reader(Pair(side(4, 2, 4), side(4, 1, 4), rank=0, num_tokens=16))
    reader.reads.tear_down(SOURCE, "channel lost")
    bad = PoolEndpoint(transport="other", metadata=b"", base_address=1, nbytes=1)
    with pytest.raises(TransferError):
        reader.reads.connect(
            SOURCE, Welcome("P", SOURCE, (reader.welcome.pools[0], bad), reader.pair.theirs)
        )
    assert reader.nic.peers == {}
