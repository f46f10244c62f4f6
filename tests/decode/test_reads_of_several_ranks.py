"""One read of a worker is one read, however many ranks carry their parts of it out.

If each rank's part counted, metrics would show as many reads as there are ranks for each that was
posted; and if an orderly stop took a read back while its request still waits for it, the worker
would end by an internal error instead.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from blockmgr.block_manager import BlockManager
from core.channel import DeploymentKeys
from core.config import SchedulerConfig, TransferConfig
from core.ids import Attempt, BlockId, Generation, Incarnation, OperationId, Owner, RequestId
from core.kv_layout import KVGroup, KVLayout
from core.messages import (
    Compatibility,
    FirstToken,
    GroupBlocks,
    Hello,
    PieceId,
    Prefill,
    PrefillFailed,
    Ticket,
    Welcome,
)
from core.sampling import SamplingParams
from core.trace import Recorder
from decode.delivery import Delivery, Loss
from decode.landing import Memory
from decode.receiver import Receiver
from decode.scheduler import DecodeScheduler
from decode.sequence import Sequence
from decode.sources import Sources
from decode.tracing import DecodeTrace
from ranks.group_reads import GroupReads
from ranks.messages import Cancel, Command, Connect, Post, TearDown, WarmUp
from tests.transfer.adversary import AdversaryNic, Network
from transfer.rank_reads import RankReads
from transfer.reader import Reader
from transfer.reads import ReadEnd, Reads

R: Owner = (RequestId("R"), Attempt(1))
P = Incarnation("P")
LAYOUT = KVLayout(
    (KVGroup(layers=(0, 1, 2, 3)),), block_size=16, num_kv_heads=1, head_dim=64, dtype="float32"
)
COMPATIBILITY = Compatibility("m", "t", LAYOUT, 1, model_dtype=LAYOUT.dtype)
NUM_BLOCKS = 256
NUM_READ = 200
SCRATCH = NUM_BLOCKS * LAYOUT.block_nbytes
NBYTES = SCRATCH + 4096
CONFIG = TransferConfig(max_inflight_mib=1)
"""A read of ``NUM_READ`` blocks is posted in several parts."""


class Rank:
    """Reads of one rank, from a source rank of its own."""

    def __init__(
        self,
        reader: Reader,
        on_end: Callable[[ReadEnd], None],
        on_begun: Callable[[OperationId], None] = lambda _: None,
    ) -> None:
        network = Network()
        self._theirs, self._mine = (np.zeros(NBYTES, np.uint8) for _ in range(2))
        self._source = AdversaryNic(network)
        self._source.register(self._theirs.ctypes.data, NBYTES)
        self.nic = AdversaryNic(network)
        self.nic.register(self._mine.ctypes.data, NBYTES)
        self.welcome = Welcome("P", P, (self._source.endpoint(),), COMPATIBILITY)
        self.reads = RankReads(
            self.nic,
            compatibility=COMPATIBILITY,
            scratch_offset=SCRATCH,
            config=CONFIG,
            stats=reader.stats,
            on_end=on_end,
            on_begun=on_begun,
        )


class Follower:
    """The other rank, in this process. What it is told comes in a later turn, as on a wire."""

    ranks = (1,)

    def __init__(self) -> None:
        self.rank: Rank | None = None
        self._loop = asyncio.get_running_loop()

    def send(self, command: Command) -> None:
        self._loop.call_soon(self._take, command)

    def kill(self) -> None:
        if self.rank is not None:
            self.rank.reads.close()

    def _take(self, command: Command) -> None:
        assert self.rank is not None
        reads = self.rank.reads
        match command:
            case Connect(source, _):
                reads.connect(source, self.rank.welcome)
            case Post(read):
                reads.post(read)
            case WarmUp(operation, source):
                reads.warm_up(operation, source)
            case Cancel(operation):
                reads.cancel(operation)
            case TearDown(source, reason):
                reads.tear_down(source, reason)
            case _:
                pytest.fail(f"{command} is for no reads")


class Worker:
    """A receiver with two ranks, and what it has told."""

    def __init__(self) -> None:
        self.deliveries: list[Delivery] = []
        self.losses: list[Loss] = []
        self.ranks: list[Rank] = []
        self.reader = Reader(layout=LAYOUT, config=CONFIG, max_quarantined_blocks=NUM_BLOCKS)
        self.stats = self.reader.stats
        self.blocks = BlockManager(LAYOUT, NUM_BLOCKS, fences=True, prefix_caching=True)
        self.scheduler = DecodeScheduler(self.blocks, LAYOUT, SchedulerConfig(), fingerprint="test")
        keys, hello = DeploymentKeys.generate().of("decode"), Hello("D", Incarnation("D"))
        self.receiver = Receiver(
            reader=self.reader,
            compatibility=COMPATIBILITY,
            open_reads=self._open,
            open_sources=lambda receiver: Sources(keys, hello, receiver),
            memory=Memory(self.blocks, self.scheduler, lambda ids, _: [b""] * len(ids)),
            owner=self,
            registry=CollectorRegistry(),
            trace=DecodeTrace(Recorder(lambda: 0.0)),
        )
        self.source = SimpleNamespace(worker_id="P", incarnation=P, queued={})
        self.receiver.paired(self.source, self.ranks[0].welcome, seconds=0.0)  # type: ignore[arg-type]

    def _open(
        self, on_end: Callable[[ReadEnd], None], on_begun: Callable[[OperationId], None]
    ) -> Reads:
        def open_own(on_own_end: Callable[[ReadEnd], None]) -> Reads:
            self.ranks.append(Rank(self.reader, on_own_end, on_begun))
            return self.ranks[0].reads

        follower = Follower()
        group = GroupReads(open_own, follower, on_end)
        follower.rank = Rank(self.reader, lambda end: group.ended(1, end))
        self.ranks.append(follower.rank)
        return group

    def delivered(self, delivery: Delivery) -> None:
        self.deliveries.append(delivery)

    def lost(self, loss: Loss) -> None:
        self.losses.append(loss)

    def memory_changed(self) -> None:
        """Nobody waits here."""

    async def land(self, is_over: Callable[[], bool]) -> None:
        """Land what is posted until ``is_over``."""
        async with asyncio.timeout(30):
            while not is_over():
                for rank in self.ranks:
                    rank.nic.finish()
                await asyncio.sleep(0)

    async def ask(self) -> Ticket:
        """R is asked for; return the ticket for all of it."""
        await self.land(lambda: not self.reader.num_operations)  # the warm-up
        prompt = tuple(range(NUM_READ * LAYOUT.block_size))
        sampling = SamplingParams(seed=1, max_tokens=4)
        self.scheduler.add(Sequence(R, prompt, sampling), remote=True)
        self.receiver.asking(self.source, Prefill(*R, prompt, sampling))  # type: ignore[arg-type]
        ids = tuple(map(BlockId, range(NUM_READ)))
        return Ticket(
            *R,
            incarnation=P,
            piece=PieceId(first_layer=0, last_layer=3, chunk=0),
            blocks=(GroupBlocks(0, 0, ids, (Generation(1),) * NUM_READ),),
            num_tokens=len(prompt),
            lease_s=30.0,
            last=True,
            first_token=FirstToken(7),
        )

    async def read(self) -> None:
        """R is asked for and offered; its read is posted, as far as the link takes it."""
        ticket = await self.ask()
        self.receiver.received(self.source, ticket)  # type: ignore[arg-type]
        async with asyncio.timeout(30):
            while not all(rank.nic.pending for rank in self.ranks):  # noqa: ASYNC110 - nothing tells
                await asyncio.sleep(0)


@pytest.fixture
async def worker() -> AsyncIterator[Worker]:
    loop_errors: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, each: loop_errors.append(each))
    made = Worker()
    yield made
    await made.receiver.close()
    made.reader.check_invariants()
    assert loop_errors == []


async def test_a_read_of_two_ranks_counts_once_and_with_the_bytes_of_both(worker: Worker) -> None:
    await worker.read()
    await worker.land(lambda: bool(worker.deliveries))
    assert worker.stats.reads_posted == worker.stats.reads_completed == 1
    assert worker.stats.bytes_total == 2 * NUM_READ * LAYOUT.block_nbytes
    assert worker.losses == []


async def test_a_part_that_landed_of_a_failed_read_counts_as_nothing(worker: Worker) -> None:
    await worker.read()
    worker.ranks[1].nic.kill(P)
    await worker.land(lambda: bool(worker.losses) and not worker.reader.num_operations)
    assert (worker.stats.reads_posted, worker.stats.reads_failed) == (1, 1)
    assert worker.stats.reads_completed == worker.stats.bytes_total == 0


async def test_an_orderly_stop_takes_back_a_read_that_is_half_posted(worker: Worker) -> None:
    """Its request ends first, so that nobody waits for what is taken back."""
    await worker.read()
    closing = asyncio.create_task(worker.receiver.close())
    await worker.land(closing.done)
    await closing
    assert worker.reader.num_receiving == worker.reader.num_operations == 0
    assert worker.stats.reads_cancelled == 1
    assert worker.deliveries == []


async def test_a_source_is_held_to_its_timeout_once_the_leaders_part_has_begun(
    worker: Worker,
) -> None:
    await worker.land(lambda: not worker.reader.num_operations)
    assert worker.reader.next_deadline() is None
    await worker.read()
    (operation,) = worker.reader._endpoints._operations.all()
    assert operation.begun_at is not None


async def test_no_source_speaks_for_another(worker: Worker) -> None:
    """It could have what it likes read out of the other one's pool, or end its requests."""
    ticket = await worker.ask()
    other = SimpleNamespace(worker_id="X", incarnation=Incarnation("X"))
    for message in (ticket, PrefillFailed(*R, incarnation=P, reason="no")):
        worker.receiver.received(other, message)  # type: ignore[arg-type]
    await asyncio.sleep(0)
    assert worker.losses == []
    assert worker.reader.num_operations == 0
    assert worker.reader.unallocated() == []
