"""The timer calls back once per arming, never after ``disarm`` or ``close``."""

import asyncio

import pytest

from transfer.fine_timer import FineTimer


class Calls:
    """Counts, and wakes whoever waits for the next call."""

    def __init__(self) -> None:
        self.count = 0
        self.event = asyncio.Event()

    def __call__(self) -> None:
        self.count += 1
        self.event.set()

    async def next(self) -> None:
        async with asyncio.timeout(60):
            await self.event.wait()
        self.event.clear()


@pytest.fixture(params=["linux", "elsewhere"])
def platform(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr("sys.platform", request.param)
    return str(request.param)


@pytest.mark.usefixtures("platform")
async def test_one_call_per_arming() -> None:
    calls = Calls()
    timer = FineTimer(calls)
    for expected in (1, 2, 3):
        timer.arm(0.0001)
        await calls.next()
        assert calls.count == expected
    timer.arm(60)
    timer.arm(0.0001)
    await calls.next()
    assert calls.count == 4
    timer.close()


@pytest.mark.usefixtures("platform")
async def test_nothing_after_disarm_or_close() -> None:
    calls, fence = Calls(), Calls()
    timer, later = FineTimer(calls), FineTimer(fence)
    timer.arm(0.0001)
    timer.disarm()
    later.arm(0.002)
    await fence.next()
    timer.arm(0.0001)
    timer.close()
    later.arm(0.002)
    await fence.next()
    assert calls.count == 0
    later.close()


async def test_arming_anew_inside_the_callback_keeps_the_rhythm() -> None:
    calls = Calls()

    def again() -> None:
        calls()
        if calls.count < 5:
            timer.arm(0.0001)

    timer = FineTimer(again)
    timer.arm(0.0001)
    while calls.count < 5:
        await calls.next()
    timer.close()
