"""Every copy and every storage call is answered exactly once, however it ends.

An operation that is never answered keeps its blocks in quarantine, or its slots pinned, for ever.
"""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from core.cache_epoch import epoch_after
from core.errors import StepFailedError
from core.ids import BlockId, OperationId
from core.tiers import CopyIn, CopyOut, Find, MarkEpoch, Read, Write
from tests.transfer.tier_parts import (
    NBYTES,
    TIMEOUT_S,
    Answers,
    Memory,
    MisbehavingStorage,
    make_tier,
    names_of,
    slots_of,
)
from transfer.tiers.metrics import MoveMetrics
from transfer.tiers.mover import TierMover


class Rig:
    def __init__(self, *, timeout_s: float = TIMEOUT_S) -> None:
        self.memory = Memory()
        self.storage = MisbehavingStorage()
        self.answers = Answers()
        self.changed = asyncio.Event()
        self.mover = TierMover(
            self.answers,
            self.memory,
            block_nbytes=NBYTES,
            storage=make_tier(self.storage, self.memory, timeout_s=timeout_s),
            metrics=MoveMetrics(CollectorRegistry(), role="test"),
            on_change=self.changed.set,
        )

    async def do(self, *actions: Any) -> None:
        """Carry ``actions`` out and return when all are answered."""
        self.answers.actions += actions
        self.mover.carry_out()
        await self.answered(*(action.operation for action in actions))

    async def answered(self, *operations: OperationId) -> None:
        async with asyncio.timeout(TIMEOUT_S):
            while not set(operations) <= self.answers.answers.keys():
                self.changed.clear()
                await self.changed.wait()


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    rig = Rig()
    yield rig
    rig.memory.fails = False
    await rig.mover.close(timeout_s=TIMEOUT_S)


def operation(number: int) -> OperationId:
    return OperationId(-number)


def blocks(*ids: int) -> tuple[BlockId, ...]:
    return tuple(map(BlockId, ids))


async def test_a_block_goes_down_to_storage_and_comes_up_again(rig: Rig) -> None:
    names = names_of(2)
    await rig.do(CopyOut(operation(1), blocks(3, 4), slots_of(0, 1)))
    await rig.do(Write(operation(2), names, slots_of(0, 1)))
    rig.memory.slots[0][:] = bytes(NBYTES)
    await rig.do(Find(operation(3), names), Read(operation(4), names, slots_of(6, 7)))
    await rig.do(CopyIn(operation(5), slots_of(6, 7), blocks(0, 1)))

    assert rig.answers.answers == {-1: False, -2: [True, True], -3: 2, -4: [True, True], -5: False}
    assert [block[0] for block in rig.memory.pool[:2]] == [3, 4]


async def test_e14_a_copy_that_raises_is_over_and_the_next_one_runs(rig: Rig) -> None:
    rig.memory.fails = True
    await rig.do(CopyOut(operation(1), blocks(1), slots_of(0)))
    await rig.do(CopyIn(operation(2), slots_of(0), blocks(1)))
    rig.memory.fails = False
    await rig.do(CopyOut(operation(3), blocks(1), slots_of(0)))

    assert rig.answers.answers == {-1: True, -2: True, -3: False}


async def test_e15_a_write_that_hangs_delays_no_copy_and_ends(rig: Rig) -> None:
    # Given a write that hangs
    rig.storage.hangs = True
    rig.answers.actions.append(Write(operation(1), names_of(2), slots_of(0, 1)))
    rig.mover.carry_out()
    await asyncio.sleep(0)

    # When blocks are copied, they are, while it hangs
    await rig.do(CopyOut(operation(2), blocks(1), slots_of(3)))
    assert -1 not in rig.answers.answers

    # Then it ends when the storage answers
    rig.storage.released.set()
    await rig.answered(operation(1))
    assert rig.answers.answers[operation(1)] == [True, True]


async def test_e15_a_write_that_hangs_for_good_ends_by_its_deadline() -> None:
    rig = Rig(timeout_s=0.05)
    rig.storage.hangs = True
    await rig.do(Write(operation(1), names_of(2), slots_of(0, 1)))
    assert rig.answers.answers[operation(1)] == [False, False]
    await rig.mover.close(timeout_s=TIMEOUT_S)


async def test_a18_an_epoch_is_told_when_it_is_written_and_when_it_could_not_be(rig: Rig) -> None:
    epoch = epoch_after("", by="router")
    rig.storage.fails = True
    rig.answers.actions.append(MarkEpoch(operation(1), epoch))
    rig.mover.carry_out()
    await rig.mover.wait_marked(timeout_s=TIMEOUT_S)
    assert rig.answers.marks == [(epoch, True)]

    # It is written with the next block, and told
    rig.storage.fails = False
    await rig.do(Write(operation(2), names_of(1), slots_of(0)))
    assert rig.answers.marks == [(epoch, True), (epoch, False)]


async def test_a18_the_wait_for_an_epoch_is_bounded(rig: Rig) -> None:
    rig.storage.hangs = True
    rig.answers.actions.append(MarkEpoch(operation(1), epoch_after("", by="router")))
    rig.mover.carry_out()
    await rig.mover.wait_marked(timeout_s=0.01)
    assert rig.answers.marks == []
    rig.storage.fails = True
    rig.storage.released.set()
    await rig.mover.wait_marked(timeout_s=TIMEOUT_S)
    assert [failed for _, failed in rig.answers.marks] == [True]


async def test_a18_what_is_queued_at_the_end_is_carried_out() -> None:
    rig = Rig()
    epoch = epoch_after("", by="router")
    rig.answers.actions.append(MarkEpoch(operation(1), epoch))
    await rig.mover.close(timeout_s=TIMEOUT_S)
    assert rig.answers.marks == [(epoch, False)]
    assert [path.rpartition("/")[2] for path in rig.storage.objects] == [epoch]


async def test_nothing_is_answered_or_begun_after_the_end() -> None:
    rig = Rig()
    rig.storage.hangs = True
    rig.answers.actions.append(Read(operation(1), names_of(1), slots_of(0)))
    rig.mover.carry_out()
    await asyncio.sleep(0)

    # When its time is over at once, but not that of the thread, which ends soon
    rig.mover._clock = iter((0.0, TIMEOUT_S)).__next__
    await rig.mover.close(timeout_s=TIMEOUT_S)

    assert rig.answers.answers == {}


async def test_a_copy_that_hangs_makes_the_end_an_error() -> None:
    rig = Rig()
    release = asyncio.Event()
    loop = asyncio.get_running_loop()

    def hang(*_: object) -> None:
        asyncio.run_coroutine_threadsafe(release.wait(), loop).result(10)

    rig.memory.store = hang  # type: ignore[method-assign]
    rig.answers.actions.append(CopyOut(operation(1), blocks(1), slots_of(0)))
    rig.mover.carry_out()
    await asyncio.sleep(0)

    with pytest.raises(StepFailedError, match="did not end within"):
        await rig.mover.close(timeout_s=0.05)
    release.set()
