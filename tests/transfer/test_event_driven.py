"""Where a transport has a descriptor to wait on, nobody polls: not the reader, not the source.

The failures guarded: a wake-up that is lost, so that a read never ends; a core that spins while
nothing moves; a loop that does nothing else while much moves.
"""

import asyncio
import contextlib
import os
import random
import time
from collections.abc import Coroutine, Iterator
from typing import Any

import numpy as np
import pytest
import uvloop

from core.ids import Incarnation
from tests.transfer.adversary import AdversaryNic, Network
from tests.transfer.source_process import SourceProcess, pattern
from transfer.pump import Pump
from transfer.transport import Extent, ReadOutcome
from transfer.transports import open_transport

P = Incarnation("P")
POOL = 4096
IDLE_S = 1.0
LOOPS = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


@pytest.fixture(params=LOOPS)
def loop(request: pytest.FixtureRequest) -> Iterator[asyncio.AbstractEventLoop]:
    loop = LOOPS[request.param]()
    yield loop
    loop.close()


def run(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(60):
            await work

    loop.run_until_complete(bounded())


class SignallingNic(AdversaryNic):
    """Wakes by an eventfd, as UCX does: only what comes after ``arm`` is told, and once."""

    def __init__(self, network: Network) -> None:
        super().__init__(network, rng=random.Random(1))
        self.wake_descriptor: int = os.eventfd(0, os.EFD_NONBLOCK)  # type: ignore[assignment]
        self.is_armed = False
        self.has_come = False
        self.num_polls = 0

    def signal(self) -> None:
        """Something has come."""
        self.has_come = True
        if self.is_armed:
            self.is_armed = False
            os.eventfd_write(self.wake_descriptor, 1)

    def arm(self) -> bool:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.wake_descriptor)
        self.is_armed = not self.has_come
        return self.is_armed

    def poll(self) -> list[ReadOutcome]:
        self.num_polls += 1
        self.has_come = False
        return super().poll()

    def step(self, count: int = 1) -> None:
        super().step(count)
        self.signal()

    def close(self) -> None:
        super().close()
        os.close(self.wake_descriptor)


class Pair:
    def __init__(self) -> None:
        network = Network()
        self.theirs = np.full(POOL, 7, dtype=np.uint8)
        self.mine = np.zeros(POOL, dtype=np.uint8)
        self.source = SignallingNic(network)
        self.source.register(self.theirs.ctypes.data, POOL)
        self.reader = SignallingNic(network)
        self.reader.register(self.mine.ctypes.data, POOL)
        self.reader.connect(P, self.source.endpoint())

    def close(self) -> None:
        self.reader.close()
        self.source.close()


def test_a_read_that_lands_while_the_loop_sleeps_is_told(loop: asyncio.AbstractEventLoop) -> None:
    async def work() -> None:
        pair = Pair()
        outcomes: asyncio.Queue[ReadOutcome] = asyncio.Queue()
        pump = Pump(pair.reader, interval_s=1.0, on_outcome=outcomes.put_nowait)
        for _ in range(20):
            pair.reader.read(P, [Extent(0, 0, 64)])
            pump.read_posted()
            asyncio.get_running_loop().call_later(0.002, pair.reader.finish)
            assert (await outcomes.get()).is_complete
        pump.close()
        pair.close()

    run(loop, work())


def test_what_comes_between_the_look_and_the_wait_is_not_lost(
    loop: asyncio.AbstractEventLoop,
) -> None:
    async def work() -> None:
        pair = Pair()
        outcomes: asyncio.Queue[ReadOutcome] = asyncio.Queue()
        arm = pair.reader.arm

        def land_then_arm() -> bool:
            pair.reader.finish()  # after the poll, before the descriptor is armed
            pair.reader.arm = arm
            return arm()

        pump = Pump(pair.reader, interval_s=1.0, on_outcome=outcomes.put_nowait)
        await asyncio.sleep(0.01)
        pair.reader.arm = land_then_arm
        pair.reader.read(P, [Extent(0, 0, 64)])
        pump.read_posted()
        assert (await outcomes.get()).is_complete
        pump.close()
        pair.close()

    run(loop, work())


def test_mutation_a_pump_that_ignores_what_arm_says_loses_it(
    loop: asyncio.AbstractEventLoop,
) -> None:
    async def work() -> None:
        pair = Pair()
        arm = pair.reader.arm
        ended = asyncio.Event()

        def land_then_arm() -> bool:
            pair.reader.finish()
            arm()
            return True  # the guard is off

        pump = Pump(pair.reader, interval_s=1.0, on_outcome=lambda _: ended.set())
        await asyncio.sleep(0.01)
        pair.reader.arm = land_then_arm
        pair.reader.read(P, [Extent(0, 0, 64)])
        pump.read_posted()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await ended.wait()
        pump.close()
        pair.close()

    run(loop, work())


def test_nobody_looks_while_nothing_comes(loop: asyncio.AbstractEventLoop) -> None:
    async def work() -> None:
        pair = Pair()
        reader, source = Pump(pair.reader, interval_s=0.0001), Pump(pair.source, interval_s=0.0001)
        pair.reader.read(P, [Extent(0, 0, 64)])
        reader.read_posted()
        await asyncio.sleep(0.01)
        before = pair.reader.num_polls, pair.source.num_polls
        await asyncio.sleep(0.2)
        assert (pair.reader.num_polls, pair.source.num_polls) == before
        assert reader.is_idle, "a read is outstanding, and nothing runs"
        # And a source serves whoever comes, untold
        pair.source.signal()
        while pair.source.num_polls == before[1]:  # noqa: ASYNC110 - nobody tells of a look
            await asyncio.sleep(0.001)
        assert pair.source.num_progress_calls > 0
        reader.close()
        source.close()
        pair.source.signal()
        await asyncio.sleep(0.01)
        pair.close()

    run(loop, work())


def test_the_loop_goes_on_while_much_ends_and_arm_never_says_wait(
    loop: asyncio.AbstractEventLoop,
) -> None:
    async def work() -> None:
        pair = Pair()
        told: list[int] = []
        turns: list[int] = []
        pump = Pump(pair.reader, interval_s=1.0, on_outcome=lambda _: told.append(len(turns)))
        pair.reader.arm = lambda: False
        for _ in range(1000):
            pair.reader.read(P, [Extent(0, 0, 4)])
            pump.read_posted()
        pair.reader.finish()
        while len(told) < 1000:
            turns.append(len(told))
            await asyncio.sleep(0)
        most = max(told.count(turn) for turn in set(told))
        assert most <= 64, "so many ends were told in one turn"
        pump.close()
        pair.close()

    run(loop, work())


@pytest.mark.ucx
@pytest.mark.parametrize("options", [{}, {"TLS": "tcp"}], ids=["shared_memory", "tcp"])
def test_real_reads_end_and_an_idle_pair_costs_nothing(
    loop: asyncio.AbstractEventLoop, options: dict[str, str]
) -> None:
    """Over real UCX, against a source in a process of its own."""
    nbytes = 4 * 2**20
    source = SourceProcess("source", nbytes, ucx_options=options, transport="ucx")
    pool = np.zeros(nbytes, dtype=np.uint8)
    transport = open_transport("ucx", Incarnation("reader"), ucx_options=options)
    transport.register(pool.ctypes.data, nbytes)

    async def work() -> None:
        outcomes: asyncio.Queue[ReadOutcome] = asyncio.Queue()
        pump = Pump(transport, interval_s=1.0, on_outcome=outcomes.put_nowait)
        transport.connect(source.incarnation, source.endpoint)
        for at in range(0, nbytes, nbytes // 8):
            transport.read(source.incarnation, [Extent(at, at, nbytes // 8)])
            pump.read_posted()
            assert (await outcomes.get()).is_complete
        assert (pool == pattern(1, nbytes)).all()
        used = time.process_time()
        await asyncio.sleep(IDLE_S)
        # A loop that spins uses all of it, and one that is woken now and then some milliseconds
        assert time.process_time() - used < IDLE_S / 2, "it spins"
        pump.close()

    try:
        run(loop, work())
    finally:
        transport.close()
        source.close()
