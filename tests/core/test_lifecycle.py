"""What a supervisor sees of a service: that it starts, works, stands still, drains and ends."""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

import pytest

from core import lifecycle as lifecycle_module
from core.bounds import MAX_SECONDS
from core.ids import new_incarnation
from core.lifecycle import Lifecycle, Work
from core.messages import DesiredWorkers


@dataclass
class Service:
    """A service without a part of its own, on a clock that the test moves."""

    now: float = 100.0
    num_requests: int = 0
    step_at: float | None = None
    lifecycle: Lifecycle = field(init=False)

    def __post_init__(self) -> None:
        self.lifecycle = Lifecycle(clock=lambda: self.now)
        self.incarnation = new_incarnation()

    def work(self) -> Work:
        return Work(
            self.incarnation,
            is_idle=lambda: self.num_requests == 0,
            num_steps=lambda: 7,
            oldest_step_at=lambda: self.step_at,
        )

    @asynccontextmanager
    async def running(self) -> AsyncIterator["asyncio.Task[None]"]:
        task = asyncio.create_task(self.lifecycle.run(self.work()))
        await asyncio.sleep(0.01)
        try:
            yield task
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task


@pytest.fixture(autouse=True)
def short_notice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifecycle_module, "DRAIN_NOTICE_S", 0.02)


async def test_a_service_is_starting_until_it_runs() -> None:
    service = Service()
    service.now += 1000  # however long a model takes to load
    health = service.lifecycle.health()
    assert (health.state, health.incarnation, health.silence_s) == ("starting", None, 0.0)
    async with service.running():
        health = service.lifecycle.health()
        assert (health.state, health.incarnation) == ("ready", service.incarnation)
        assert (health.is_idle, health.num_steps, health.silence_s) == (True, 7, 0.0)


async def test_a_step_that_does_not_complete_is_silence_though_the_loop_ticks() -> None:
    service = Service(step_at=100.0)
    async with service.running():
        service.now = 130.0
        service.lifecycle._last_tick = 130.0
        assert service.lifecycle.health().silence_s == 30.0
        service.step_at = 129.0
        assert service.lifecycle.health().silence_s == 1.0


async def test_an_event_loop_that_stands_still_is_silence_though_no_step_runs() -> None:
    service = Service()
    async with service.running():
        seen: list[float] = []
        look = threading.Thread(target=lambda: seen.append(service.lifecycle.health().silence_s))
        service.now = 145.0  # the loop, which this coroutine holds, cannot tick
        look.start()
        look.join()
        assert seen == [45.0]


def test_a_controller_is_silent_from_its_last_word_on_and_never_before_its_first() -> None:
    service = Service()
    lifecycle = service.lifecycle
    service.now += 1000.0
    assert lifecycle.controller_silence_s() is None, "nobody supervises it"
    lifecycle.hear(DesiredWorkers(0, prefill=1, decode=1))
    service.now += 40.0
    assert lifecycle.controller_silence_s() == 40.0
    lifecycle.hear(DesiredWorkers(0, prefill=1, decode=1))
    assert lifecycle.controller_silence_s() == 0.0
    service.now += 10.0**9  # longer than a message may say, and still heard
    assert lifecycle.controller_silence_s() == MAX_SECONDS


async def test_stop_ends_a_service_that_has_requests() -> None:
    service = Service(num_requests=1)
    async with service.running() as task:
        service.lifecycle.stop.set()
        await asyncio.wait_for(task, 60)


async def test_a_drain_ends_by_itself_when_the_last_request_has_and_not_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lifecycle_module, "TICK_S", 3600.0)
    service = Service(num_requests=1)
    async with service.running() as task:
        service.lifecycle.drain.set()
        await asyncio.sleep(0.1)
        service.lifecycle.changed()
        await asyncio.sleep(0.05)
        assert not task.done()
        assert service.lifecycle.health().state == "draining"
        service.num_requests = 0
        service.lifecycle.changed()
        await asyncio.wait_for(task, 60)  # by the wake-up: there is no tick


async def test_an_idle_service_stays_a_while_for_what_was_sent_before_the_drain_was_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lifecycle_module, "DRAIN_NOTICE_S", 0.5)
    service = Service()
    async with service.running() as task:
        service.lifecycle.drain.set()
        await asyncio.sleep(0.1)
        assert not task.done()
        await asyncio.wait_for(task, 60)
