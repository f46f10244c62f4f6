"""Many short transfers, some of them left, some without their source: nothing is wrong or lost.

What a worker has between its channel and its pool is real on both sides; only models are absent, so
that a transfer takes a millisecond and rare orders of events are met. Every block that was
delivered is compared byte by byte, and poison is on in all pools.
"""

import asyncio
import logging
import multiprocessing
import os
import random
import signal
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from blockmgr.fences import KVWriters
from blockmgr.states import BlockState
from blockmgr.worker_blocks import WorkerBlocks
from core.channel import DeploymentKeys
from core.ids import Attempt, Incarnation, Owner, RequestId, WorkerId, new_incarnation
from core.messages import Hello, PrefillPeer
from core.sampling import SamplingParams
from core.trace import Recorder
from decode.delivery import Delivery, Loss
from decode.landing import Memory
from decode.receiver import Receiver
from decode.scheduler import DecodeScheduler
from decode.sequence import Sequence
from decode.sources import Sources
from decode.tracing import DecodeTrace
from tests.chaos.small_pool import COMPATIBILITY, CONFIG, LAYOUT, SmallPool, content
from tests.chaos.soak_source import HOME_S, SourceSpec, run_source
from tests.chaos.soak_source import NUM_BLOCKS as SOURCE_BLOCKS
from tests.fork_server import forked_process
from transfer.rank_reads import RankReads
from transfer.reader import Reader
from transfer.transports import open_transport

log = logging.getLogger(__name__)

pytestmark = [pytest.mark.ucx, pytest.mark.timeout(400)]

NUM_BLOCKS = 96
MAX_BLOCKS = 12
NUM_CLIENTS = 24
"""Requests at once: together they want more than there is."""
NUM_SOURCES = 3
CANCELLED = 0.05
TRANSFERS_PER_KILL = 500
"""Each costs the transfers that are under way their source: some eight, so one in a hundred."""
TRANSFERS_PER_FREEZE = 10_000
FREEZE_S = 2.5
"""Longer than ``read_timeout_s``: what was posted has been torn down when the source wakes."""


@dataclass
class SourceHandle:
    """One life of a source."""

    process: BaseProcess
    pipe: Connection
    peer: PrefillPeer


class Soak:
    """A decode side, its sources, and clients that ask, leave and compare."""

    def __init__(self, options: dict[str, str], seed: int, *, keeps_leases: bool) -> None:
        self._options = options
        self._keeps_leases = keeps_leases
        self._random = random.Random(seed)
        self._keys = DeploymentKeys.generate()
        self._clock = asyncio.get_running_loop().time
        self.sources: list[SourceHandle] = []
        self.counts: Counter[str] = Counter()
        self._outcomes: dict[Owner, asyncio.Future[str]] = {}
        self._pool = SmallPool(NUM_BLOCKS)
        incarnation = new_incarnation()
        self._transport = open_transport("auto", incarnation, ucx_options=options)
        self._transport.register(self._pool.address, self._pool.nbytes)
        watched = WorkerBlocks.make(
            LAYOUT,
            self._pool,
            CONFIG,
            incarnation=incarnation,
            writers=KVWriters.CONSUMER,
            clock=self._clock,
        )
        self.blocks, self.poison = watched.manager, watched.poison
        self._scheduler = DecodeScheduler(
            self.blocks, LAYOUT, CONFIG.scheduler, fingerprint="model"
        )
        self.reader = Reader(
            layout=LAYOUT, config=CONFIG.transfer, max_quarantined_blocks=NUM_BLOCKS // 2
        )
        hello = Hello("reader", incarnation, compatibility=COMPATIBILITY)
        self._receiver = Receiver(
            reader=self.reader,
            compatibility=COMPATIBILITY,
            open_reads=lambda on_end, on_begun: RankReads(
                self._transport,
                compatibility=COMPATIBILITY,
                scratch_offset=self._pool.scratch_offset,
                config=CONFIG.transfer,
                stats=self.reader.stats,
                on_end=on_end,
                on_begun=on_begun,
            ),
            open_sources=lambda receiver: Sources(self._keys.of("decode"), hello, receiver),
            memory=Memory(self.blocks, self._scheduler, lambda *_: ()),
            owner=self,
            registry=CollectorRegistry(),
            trace=DecodeTrace(Recorder(self._clock, max_requests=0)),
        )

    @classmethod
    @asynccontextmanager
    async def open(
        cls, options: dict[str, str], seed: int, *, keeps_leases: bool = True
    ) -> AsyncIterator["Soak"]:
        soak = cls(options, seed, keeps_leases=keeps_leases)
        keeping_time = asyncio.create_task(soak._receiver.run())
        try:
            for _ in range(NUM_SOURCES):
                soak.sources.append(await soak._start_source())
            yield soak
        finally:
            keeping_time.cancel()
            await soak._receiver.close()
            for source in soak.sources:
                source.process.kill()
                source.process.join()

    async def _start_source(self) -> SourceHandle:
        incarnation = new_incarnation()
        ours, theirs = multiprocessing.Pipe()
        spec = SourceSpec(incarnation, self._keys, self._options, self._keeps_leases)
        process = forked_process(run_source, (spec, theirs))
        process.daemon = True
        process.start()
        theirs.close()
        address = await asyncio.to_thread(ours.recv)
        peer = PrefillPeer(WorkerId("source"), Incarnation(incarnation), address)
        return SourceHandle(process, ours, peer)

    # What the receiver tells

    def delivered(self, delivery: Delivery) -> None:
        self._outcomes[delivery.owner].set_result("delivered")

    def lost(self, loss: Loss) -> None:
        assert loss.kind == "transfer", loss
        outcome = self._outcomes.get(loss.owner)
        if outcome is not None and not outcome.done():
            outcome.set_result("lost")

    def memory_changed(self) -> None:
        self._receiver.retry_allocations()

    # What happens

    async def run(self, num_transfers: int) -> None:
        """Make ``num_transfers``, and return when the last has ended."""
        numbers = iter(range(num_transfers))

        async def client() -> None:
            for number in numbers:
                await self._transfer(number)
                await self._strike(number)

        async with asyncio.TaskGroup() as group:
            for _ in range(NUM_CLIENTS):
                group.create_task(client())

    async def _strike(self, number: int) -> None:
        """After some transfers, kill a source and start another one, or freeze one for a while."""
        source = self._random.choice(self.sources)
        if number % TRANSFERS_PER_KILL == TRANSFERS_PER_KILL - 1:
            self.counts["kills"] += 1
            self.sources.remove(source)
            source.process.kill()
            await asyncio.to_thread(source.process.join)
            source.pipe.close()
            self.sources.append(await self._start_source())
        elif number % TRANSFERS_PER_FREEZE == TRANSFERS_PER_FREEZE // 2:
            self.counts["freezes"] += 1
            assert source.process.pid is not None
            os.kill(source.process.pid, signal.SIGSTOP)
            await asyncio.sleep(FREEZE_S)
            if source.process.is_alive():
                os.kill(source.process.pid, signal.SIGCONT)

    async def _transfer(self, number: int) -> None:
        """Ask until it is delivered, or the client leaves."""
        num_blocks = self._random.randint(1, MAX_BLOCKS)
        is_left = self._random.random() < CANCELLED
        for attempt in range(1, 64):
            owner = (RequestId(str(number)), Attempt(attempt))
            outcome = self._ask(owner, num_blocks)
            try:
                if is_left:
                    patience_s = self._random.random() * 0.02
                    async with asyncio.timeout(patience_s):
                        result = await asyncio.shield(outcome)
                else:
                    result = await outcome
            except TimeoutError:
                result = "left"
            self._end(owner, result, num_blocks)
            if result != "lost":
                return
        raise AssertionError(f"request {number} is never served")

    def _ask(self, owner: Owner, num_blocks: int) -> asyncio.Future[str]:
        outcome = self._outcomes[owner] = asyncio.get_running_loop().create_future()
        sequence = Sequence(
            owner=owner,
            prompt_token_ids=(1,) * (num_blocks * LAYOUT.block_size),
            sampling=SamplingParams(seed=1, max_tokens=1),
        )
        self._scheduler.add(sequence, remote=True)
        self._receiver.request(sequence, self._random.choice(self.sources).peer)
        return outcome

    def _end(self, owner: Owner, result: str, num_blocks: int) -> None:
        """Compare what came; give everything back."""
        self.counts[result] += 1
        del self._outcomes[owner]
        match result:
            case "delivered":
                (table,) = self.blocks.block_tables(owner)
                came = self._pool.rows[table]
                expected = content(int(owner[0]), owner[1], num_blocks)
                assert np.array_equal(came, expected), (owner, table)
                self.counts["blocks"] += num_blocks
                self._scheduler.deliver(owner, 7)
                self._scheduler.finish_delivered(owner)
            case "lost":
                self._scheduler.lose_prefill(owner)
            case _:
                if self._scheduler.abort(owner):
                    self._receiver.cancel(owner)
        self.memory_changed()

    async def settle(self) -> list[dict[str, int]]:
        """Wait until all is home; return the blocks of each source."""
        # Reads time out, and leases whose end was lost run out: the sources wait for those.
        async with asyncio.timeout(HOME_S):
            while self.reader.num_operations or self.reader.num_receiving:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        for source in self.sources:
            source.pipe.send("end")
        return [await asyncio.to_thread(source.pipe.recv) for source in self.sources]


@pytest.mark.parametrize(
    ("path", "num_transfers"),
    [
        ("all", 1_000),
        ("tcp", 1_000),
        pytest.param("all", 100_000, marks=[pytest.mark.slow, pytest.mark.timeout(3600)]),
        pytest.param("tcp", 20_000, marks=[pytest.mark.slow, pytest.mark.timeout(3600)]),
    ],
)
async def test_c20_i08_no_transfer_is_wrong_and_no_block_is_lost(
    path: str, num_transfers: int
) -> None:
    began_at = asyncio.get_running_loop().time()
    async with Soak.open({"TLS": path}, seed=num_transfers) as soak:
        await soak.run(num_transfers)
        seconds = asyncio.get_running_loop().time() - began_at
        of_sources = await soak.settle()
        counts = " ".join(f"{name}={count}" for name, count in sorted(soak.counts.items()))
        assert soak.poison is not None
        log.warning(
            "event=soaked path=%s transfers=%d seconds=%.0f %s reads=%d timeouts=%d verified=%d",
            path,
            num_transfers,
            seconds,
            counts,
            soak.reader.stats.reads_completed,
            soak.reader.stats.read_timeouts,
            soak.poison.num_verified,
        )
        soak.blocks.check_invariants()
        soak.reader.check_invariants()
        assert soak.counts["delivered"] + soak.counts["left"] == num_transfers
        assert soak.blocks.counts()[BlockState.FREE] == NUM_BLOCKS
        assert of_sources == [{"FREE": SOURCE_BLOCKS}] * NUM_SOURCES


async def test_c20_the_adversary_wins_where_sources_free_what_they_have_promised() -> None:
    with pytest.raises(ExceptionGroup) as noticed:
        async with Soak.open({}, seed=1, keeps_leases=False) as soak:
            await soak.run(1_000)
    assert noticed.group_contains(AssertionError)
