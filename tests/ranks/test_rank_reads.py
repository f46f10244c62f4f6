"""Real ranks read from real sources: what ends when a source, or a rank, goes away in mid-read.

Each of two ranks reads its own heads from its own source rank, over TCP, where a frozen source
keeps a read in progress for as long as nobody tears it down.
"""

import asyncio
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from core.errors import InternalError
from core.ids import Attempt, BlockId, Generation, Incarnation, OperationId, RequestId, WorkerId
from core.messages import GroupBlocks, PieceId, Welcome
from ranks.leader import Ranks
from tests.engine.tiny_models import make_tiny_model
from tests.ranks.worker_ranks import DEADLINE_S, LOST, NUM_BLOCKS, followers, started
from tests.transfer.source_process import SourceProcess, pattern
from transfer.actions import PostRead
from transfer.reads import ReadEnd, Reads
from transfer.stats import TransferStats

pytestmark = [pytest.mark.ucx, pytest.mark.timeout(240)]

TCP = {"TLS": "tcp"}
SOURCE = Incarnation("5a5a5a5a5a5a5a5a")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture
async def ranks(model: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Ranks]:
    monkeypatch.setenv("UCX_TLS", "tcp")
    async with started(model) as made:
        yield made


@pytest.fixture
def sources(ranks: Ranks) -> Iterator[list[SourceProcess]]:
    nbytes = ranks.engine.layout.block_nbytes * NUM_BLOCKS
    made = [
        SourceProcess(f"{SOURCE}.{rank}", nbytes, ucx_options=TCP, seed=rank, transport="ucx")
        for rank in range(2)
    ]
    yield made
    for source in made:
        source.close()


class Reading:
    """Reads of all ranks from the sources, and what they told."""

    def __init__(self, ranks: Ranks, sources: list[SourceProcess]) -> None:
        self.ends: asyncio.Queue[ReadEnd] = asyncio.Queue()
        self.reads: Reads = ranks.open_reads(TransferStats(), self.ends.put_nowait)
        self._welcome = Welcome(
            worker_id=WorkerId("prefill-0"),
            incarnation=SOURCE,
            pools=tuple(source.endpoint for source in sources),
            compatibility=ranks.engine.compatibility,
        )
        self.connect()

    def connect(self) -> None:
        self.reads.connect(SOURCE, self._welcome)

    def post(self, operation: int) -> None:
        """Read the first half of the sources' blocks to the second half of the pools'."""
        half = NUM_BLOCKS // 2
        (source, target) = (
            GroupBlocks(
                group=0,
                first_index=0,
                block_ids=tuple(map(BlockId, range(first, first + half))),
                generations=(Generation(1),) * half,
            )
            for first in (0, half)
        )
        self.reads.post(
            PostRead(
                operation=OperationId(operation),
                peer=SOURCE,
                owner=(RequestId("r"), Attempt(1)),
                piece=PieceId(first_layer=0, last_layer=3, chunk=0),
                source=(source,),
                target=(target,),
                first_token=0,
                end_token=half * 8,
            )
        )

    async def next_end(self) -> ReadEnd:
        return await asyncio.wait_for(self.ends.get(), DEADLINE_S)

    async def until_only_rank_1_is_missing(self, operation: int) -> None:
        read = self.reads._outstanding[OperationId(operation)]
        async with asyncio.timeout(DEADLINE_S):
            while read.waiting_for != {1}:  # noqa: ASYNC110 - nothing tells of parts
                await asyncio.sleep(0.01)


async def test_each_rank_reads_its_own_part(ranks: Ranks, sources: list[SourceProcess]) -> None:
    reading = Reading(ranks, sources)
    reading.post(1)
    end = await reading.next_end()
    half = ranks.engine.layout.block_nbytes * NUM_BLOCKS // 2
    assert (end.operation, end.failure, end.nbytes) == (1, None, 2 * half)
    landed = ranks.engine.pool.blocks[NUM_BLOCKS // 2 : NUM_BLOCKS].flatten().numpy()
    assert np.array_equal(landed, pattern(0, 2 * half)[:half])
    reading.reads.close()


async def test_c08_a_source_rank_that_freezes_in_mid_read_fails_the_whole_read(
    ranks: Ranks, sources: list[SourceProcess]
) -> None:
    """And when it wakes up, the pair reads again."""
    reading = Reading(ranks, sources)
    sources[1].freeze()
    reading.post(1)
    await reading.until_only_rank_1_is_missing(1)
    assert reading.ends.empty()

    reading.reads.tear_down(SOURCE, "a read takes too long")
    end = await reading.next_end()
    assert end.failure == "rank 1: a read takes too long"

    sources[1].wake()
    reading.connect()
    reading.post(2)
    end = await reading.next_end()
    assert (end.operation, end.failure) == (2, None)
    assert reading.ends.empty()
    reading.reads.close()


@pytest.mark.slow
async def test_a_source_rank_that_is_killed_fails_the_read_without_being_asked(
    ranks: Ranks, sources: list[SourceProcess]
) -> None:
    reading = Reading(ranks, sources)
    sources[1].freeze()
    reading.post(1)
    await reading.until_only_rank_1_is_missing(1)
    sources[1].kill()
    end = await reading.next_end()
    assert end.failure is not None
    assert end.failure.startswith("rank 1: ")
    reading.reads.close()


@pytest.mark.slow
async def test_a_rank_killed_in_mid_read_ends_the_worker_and_nothing_is_told_of_the_read(
    ranks: Ranks, sources: list[SourceProcess]
) -> None:
    reading = Reading(ranks, sources)
    watching = asyncio.create_task(ranks.watch())
    sources[1].freeze()
    reading.post(1)
    await reading.until_only_rank_1_is_missing(1)
    (follower,) = followers()
    follower.send_signal(signal.SIGKILL)
    with pytest.raises(InternalError, match=LOST):
        await asyncio.wait_for(watching, DEADLINE_S)
    reading.reads.close()
    await asyncio.sleep(0)
    assert reading.ends.empty()
    assert not followers()


@pytest.mark.slow
async def test_a_worker_that_stops_in_mid_read_stops_all_ranks_reads(
    ranks: Ranks, sources: list[SourceProcess]
) -> None:
    reading = Reading(ranks, sources)
    sources[1].freeze()
    reading.post(1)
    await reading.until_only_rank_1_is_missing(1)
    assert not await reading.reads.drain(timeout_s=0.05)
    reading.reads.close()
    assert not followers()
    before = torch.clone(ranks.engine.pool.blocks)
    sources[1].wake()
    await asyncio.sleep(0.1)
    assert torch.equal(ranks.engine.pool.blocks, before)
