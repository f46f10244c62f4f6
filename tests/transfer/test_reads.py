"""Reads over a hostile network: in small parts, each ended once, and the loop goes on meanwhile."""

import asyncio
import itertools
import random
import time
from collections.abc import AsyncIterator, Callable

import numpy as np
import pytest

from core.config import TransferConfig
from core.ids import (
    Attempt,
    BlockId,
    Generation,
    Incarnation,
    OperationId,
    Owner,
    ReadId,
    RequestId,
)
from core.kv_layout import KVGroup, KVLayout
from core.messages import Compatibility, GroupBlocks, PieceId, Welcome
from tests.transfer.adversary import AdversaryNic, Network
from transfer.actions import PostRead
from transfer.rank_reads import LONE_QUANTUM_NBYTES, QUANTUM_NBYTES, RankReads
from transfer.reads import ReadEnd
from transfer.stats import TransferStats
from transfer.transport import Extents

P = Incarnation("P")
LAYOUT = KVLayout(
    (KVGroup(layers=(0, 1, 2, 3)),), block_size=16, num_kv_heads=1, head_dim=64, dtype="float32"
)
NUM_BLOCKS = 256
SCRATCH = NUM_BLOCKS * LAYOUT.block_nbytes
NBYTES = SCRATCH + 4096
ONE_IN_FLIGHT = TransferConfig(max_inflight_mib=1)
"""A quantum fills the share of a peer."""


class Nic(AdversaryNic):
    """Tells what is called, and may take its time."""

    def __init__(self, network: Network) -> None:
        super().__init__(network, rng=random.Random(3))
        self.on_read: Callable[[], None] = lambda: None
        self.posted_nbytes: list[int] = []

    def read(self, peer: Incarnation, extents: Extents) -> ReadId:
        read = super().read(peer, extents)
        self.posted_nbytes.append(int(np.asarray(extents)[:, 2].sum()))
        self.on_read()
        return read


class Side:
    """One rank of a decode worker, paired with one source."""

    def __init__(self, config: TransferConfig) -> None:
        network = Network()
        rng = np.random.default_rng(1)
        self.theirs = rng.integers(0, 256, NBYTES, dtype=np.uint8)
        self.mine = np.zeros(NBYTES, dtype=np.uint8)
        self.source = AdversaryNic(network)
        self.source.register(self.theirs.ctypes.data, NBYTES)
        self.nic = Nic(network)
        self.nic.register(self.mine.ctypes.data, NBYTES)
        self.ends: list[ReadEnd] = []
        self.begun: list[OperationId] = []
        compatibility = Compatibility("m", "t", LAYOUT, 1, model_dtype=LAYOUT.dtype)
        self.reads = RankReads(
            self.nic,
            compatibility=compatibility,
            scratch_offset=SCRATCH,
            config=config,
            stats=TransferStats(),
            on_end=self.ends.append,
            on_begun=self.begun.append,
        )
        self.reads.connect(P, Welcome("P", P, (self.source.endpoint(),), compatibility))

    def post(self, number: int, owner: str, first: int, count: int) -> None:
        ids = tuple(BlockId(i) for i in range(first, first + count))
        blocks = (GroupBlocks(0, 0, ids, tuple(Generation(1) for _ in ids)),)
        who: Owner = (RequestId(owner), Attempt(1))
        self.reads.post(
            PostRead(
                OperationId(number),
                P,
                who,
                PieceId(0, 3, 0),
                source=blocks,
                target=blocks,
                first_token=0,
                end_token=count * LAYOUT.block_size,
            )
        )

    async def turn(self) -> None:
        """Let everything that is due happen."""
        for _ in range(4):
            await asyncio.sleep(0)

    async def until_ended(self, count: int = 1) -> None:
        """Land whatever is posted until ``count`` reads have ended."""
        for _ in range(1_000_000):
            if len(self.ends) >= count:
                return
            self.nic.finish()
            await asyncio.sleep(0)
        pytest.fail("a read does not end")

    def is_landed(self, first: int, count: int) -> bool:
        part = slice(first * LAYOUT.block_nbytes, (first + count) * LAYOUT.block_nbytes)
        return bool((self.mine[part] == self.theirs[part]).all())


MakeSide = Callable[..., Side]


@pytest.fixture
async def make_side() -> AsyncIterator[MakeSide]:
    made: list[Side] = []

    def make(config: TransferConfig | None = None) -> Side:
        made.append(Side(config or TransferConfig()))
        return made[-1]

    yield make
    for side in made:
        side.reads.close()
        assert side.nic.peers == {}


async def test_a_read_is_posted_in_parts_and_ends_once(make_side: MakeSide) -> None:
    side = make_side()
    side.post(1, "r", 0, NUM_BLOCKS)
    assert side.nic.posted_nbytes == [], "a post is for the loop's next turn"
    await side.until_ended()
    assert len(side.nic.posted_nbytes) > 1
    assert QUANTUM_NBYTES < max(side.nic.posted_nbytes) <= LONE_QUANTUM_NBYTES, "it is alone"
    (end,) = side.ends
    assert (end.operation, end.failure, end.is_cancelled) == (1, None, False)
    assert end.nbytes == sum(side.nic.posted_nbytes) == NUM_BLOCKS * LAYOUT.block_nbytes
    assert side.is_landed(0, NUM_BLOCKS)
    assert not side.mine[SCRATCH:].any()


async def test_the_loop_goes_on_between_posts_that_take_long(make_side: MakeSide) -> None:
    """Over shared memory a post is the copy. A long read must not hold up tokens on their way."""
    side = make_side()
    order: list[str] = []
    side.nic.on_read = lambda: (time.sleep(0.001), order.append("post"))[1]
    side.post(1, "r", 0, NUM_BLOCKS // 2)
    side.post(2, "s", NUM_BLOCKS // 2, NUM_BLOCKS // 2)

    async def other_work() -> None:
        while len(side.ends) < 2:
            order.append("other")
            await asyncio.sleep(0)

    other = asyncio.create_task(other_work())
    await side.until_ended(2)
    await other
    posts = [at for at, what in enumerate(order) if what == "post"]
    assert len(posts) == len(side.nic.posted_nbytes) > 2
    assert all("other" in order[a:b] for a, b in itertools.pairwise(posts))


async def test_a_short_read_does_not_wait_for_a_long_one(make_side: MakeSide) -> None:
    side = make_side(ONE_IN_FLIGHT)
    side.post(1, "long", 0, NUM_BLOCKS - 1)
    await side.turn()
    side.post(2, "short", NUM_BLOCKS - 1, 1)
    await side.until_ended(2)
    assert [end.operation for end in side.ends] == [2, 1]
    assert len(side.nic.posted_nbytes) > 3
    assert side.nic.posted_nbytes[1:3].count(LAYOUT.block_nbytes) == 1


async def test_b13_a_cancelled_read_posts_no_more_and_ends_when_what_is_posted_has(
    make_side: MakeSide,
) -> None:
    side = make_side(ONE_IN_FLIGHT)
    side.post(1, "r", 0, NUM_BLOCKS)
    side.post(2, "r", 0, NUM_BLOCKS)
    await side.turn()
    side.reads.cancel(OperationId(1))
    side.reads.cancel(OperationId(2))
    side.reads.cancel(OperationId(99))
    await side.turn()
    assert [end.operation for end in side.ends] == [2], "a part of 1 may still land"
    await side.until_ended(2)
    assert all(end.is_cancelled and end.failure is None for end in side.ends)
    assert len(side.nic.posted_nbytes) == 1
    assert not side.mine[QUANTUM_NBYTES:].any()


async def test_a_tear_down_ends_what_is_posted_and_what_is_not(make_side: MakeSide) -> None:
    side = make_side(ONE_IN_FLIGHT)
    for number in (1, 2, 3):
        side.post(number, f"r{number}", 0, NUM_BLOCKS)
    await side.turn()
    side.nic.freeze(P)
    side.reads.tear_down(P, "a reason")
    assert side.ends == [], "never from within a call"
    await side.turn()
    assert sorted(end.operation for end in side.ends) == [1, 2, 3]
    assert {end.failure for end in side.ends} == {"a reason"}
    assert side.nic.pending == {}
    side.post(4, "r", 0, 1)
    await side.turn()
    assert "not connected" in (side.ends[-1].failure or "")


async def test_a_lost_source_fails_each_of_its_reads_once(make_side: MakeSide) -> None:
    side = make_side(ONE_IN_FLIGHT)
    for number in (1, 2):
        side.post(number, f"r{number}", 0, NUM_BLOCKS)
    await side.turn()
    side.nic.kill(P)
    await side.until_ended(2)
    await side.turn()
    assert sorted(end.operation for end in side.ends) == [1, 2]
    assert all(end.failure for end in side.ends)


async def test_a_warm_up_touches_no_block(make_side: MakeSide) -> None:
    side = make_side()
    side.reads.warm_up(OperationId(1), P)
    side.reads.warm_up(OperationId(2), Incarnation("nobody"))
    await side.until_ended(2)
    ends = {end.operation: end.failure for end in side.ends}
    assert ends[OperationId(1)] is None
    assert "not connected" in (ends[OperationId(2)] or "")
    assert not side.mine[:SCRATCH].any()
    assert side.mine[SCRATCH:].any()


async def test_a_drain_posts_nothing_more(make_side: MakeSide) -> None:
    side = make_side(ONE_IN_FLIGHT)
    side.post(1, "r", 0, NUM_BLOCKS)
    await side.turn()
    side.nic.finish()
    assert await side.reads.drain(timeout_s=60)
    assert len(side.nic.posted_nbytes) == 1
    assert side.ends == []


async def test_a_read_that_waits_its_turn_has_not_begun(make_side: MakeSide) -> None:
    side = make_side(ONE_IN_FLIGHT)
    side.post(1, "long", 0, NUM_BLOCKS)
    side.post(2, "next", 0, NUM_BLOCKS)
    assert side.begun == []
    await side.turn()
    assert side.begun == [1]
    side.nic.finish()
    await side.until_ended(1)
    await side.turn()
    assert side.begun == [1, 2]
    await side.until_ended(2)
    assert side.begun == [1, 2], "told once each"


async def test_a_read_that_is_asked_for_while_all_end_fails(make_side: MakeSide) -> None:
    side = make_side()
    assert await side.reads.drain(timeout_s=60)
    side.post(1, "r", 0, 1)
    side.reads.warm_up(OperationId(2), P)
    await side.turn()
    assert [end.operation for end in side.ends] == [1, 2]
    assert {end.failure for end in side.ends} == {"this worker is ending"}
    assert side.begun == []
