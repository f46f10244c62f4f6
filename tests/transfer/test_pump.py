"""The pump makes progress while, and only while, somebody's read is outstanding."""

import asyncio
import random

import numpy as np
import pytest

from core.ids import Incarnation
from tests.transfer.adversary import AdversaryNic, Network
from transfer.pump import Pump
from transfer.transport import Extent, ReadOutcome

P = Incarnation("P")
POOL = 1024


class Pair:
    """A reader and a source over the adversary, each with memory."""

    def __init__(self) -> None:
        network = Network()
        self.theirs = np.full(POOL, 7, dtype=np.uint8)
        self.mine = np.zeros(POOL, dtype=np.uint8)
        self.source = AdversaryNic(network, rng=random.Random(1))
        self.source.register(self.theirs.ctypes.data, POOL)
        self.reader = AdversaryNic(network, rng=random.Random(2))
        self.reader.register(self.mine.ctypes.data, POOL)
        self.reader.connect(P, self.source.endpoint())


async def until_idle(pump: Pump) -> None:
    for _ in range(1_000_000):
        if pump.is_idle:
            return
        await asyncio.sleep(0)
    pytest.fail("the pump goes on")


@pytest.fixture
def pair() -> Pair:
    return Pair()


async def test_each_outcome_is_reported_once_and_then_nothing_runs(pair: Pair) -> None:
    outcomes: list[ReadOutcome] = []
    done = asyncio.Event()

    def take(outcome: ReadOutcome) -> None:
        outcomes.append(outcome)
        if len(outcomes) == 2:
            done.set()

    pump = Pump(pair.reader, interval_s=0.0001, on_outcome=take)
    assert pump.is_idle
    reads = []
    for at in (0, 512):
        reads.append(pair.reader.read(P, [Extent(at, at, 512)]))
        pump.read_posted()
    assert not pump.is_idle
    pair.reader.finish()
    async with asyncio.timeout(60):
        await done.wait()
    assert [outcome.read for outcome in outcomes] == reads
    assert pump.is_idle


async def test_a_read_posted_by_an_outcome_is_pumped_too(pair: Pair) -> None:
    done = asyncio.Event()
    rest = [Extent(0, 0, 8), Extent(8, 8, 8)]

    def take(_: ReadOutcome) -> None:
        if not rest:
            done.set()
            return
        pair.reader.read(P, [rest.pop()])
        pair.reader.finish()
        pump.read_posted()

    pump = Pump(pair.reader, interval_s=0.0001, on_outcome=take)
    pair.reader.read(P, [Extent(16, 16, 8)])
    pump.read_posted()
    pair.reader.finish()
    async with asyncio.timeout(60):
        await done.wait()
    assert (pair.mine[:24] == 7).all()
    assert pump.is_idle


async def test_a_source_progresses_from_reading_to_not_reading(pair: Pair) -> None:
    pump = Pump(pair.source, interval_s=0.0001)
    pump.serve("D", active=True)
    pump.serve("E", active=True)
    pump.serve("D", active=False)
    for _ in range(1000):
        if pair.source.num_progress_calls > 3:
            break
        await asyncio.sleep(0)
    assert not pump.is_idle
    pump.serve("E", active=False)
    pump.serve("never seen", active=False)
    await until_idle(pump)


async def test_reads_that_end_by_a_teardown_stop_the_pump(pair: Pair) -> None:
    reported: list[ReadOutcome] = []
    pump = Pump(pair.reader, interval_s=0.0001, on_outcome=reported.append)
    pair.reader.read(P, [Extent(0, 0, 8)])
    pump.read_posted()
    pair.reader.freeze(P)
    for _ in pair.reader.tear_down(P):
        pump.read_ended()
    await until_idle(pump)
    assert reported == []


async def test_close_reports_nothing_more(pair: Pair) -> None:
    reported: list[ReadOutcome] = []
    pump = Pump(pair.reader, interval_s=0.0001, on_outcome=reported.append)
    pair.reader.read(P, [Extent(0, 0, 8)])
    pump.read_posted()
    pair.reader.finish()
    pump.close()
    pump.serve("D", active=True)
    assert pump.is_idle
    await asyncio.sleep(0)
    assert reported == []


async def test_drain_waits_for_own_reads_and_no_longer(pair: Pair) -> None:
    pump = Pump(pair.reader, interval_s=0.0001)
    assert await pump.drain(timeout_s=60)
    pair.reader.read(P, [Extent(0, 0, 8)])
    pump.read_posted()
    assert not await pump.drain(timeout_s=0.01)
    pair.reader.finish()
    assert await pump.drain(timeout_s=60)
    pump.close()
