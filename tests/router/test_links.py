"""A request is sent over a link that leads somewhere, or it waits; and no link is cut for nothing.

The failure guarded against: a worker that was silent for a while reports again, and needs not
prove itself again. A request that was placed on it before the new link had begun to connect was
dropped without a word, and its client waited for ever. And a router that stood still itself, which
took all its workers for silent, though their reports had come and lay unread.
"""

import asyncio
import time
from collections.abc import AsyncIterator

import pytest

from core.channel import DeploymentKeys
from core.config import SluiceConfig
from core.ids import Attempt, RequestId
from core.lifecycle import Lifecycle
from core.messages import Failed, Generate, Output, Role
from core.sampling import SamplingParams
from core.trace import Recorder
from router.fleet import Fleet
from router.links import DecodeLink
from router.metrics import RouterMetrics
from router.registry import Worker
from tests.router.scripted_worker import ScriptedWorker, silence

SILENCE_S = 1.0


class Listener:
    """Counts the links that were lost."""

    def __init__(self) -> None:
        self.num_lost = 0

    def on_output(self, link: DecodeLink, output: Output) -> None: ...

    def on_failed(self, link: DecodeLink, failed: Failed) -> None: ...

    def on_link_lost(self, link: DecodeLink) -> None:
        del link
        self.num_lost += 1


@pytest.fixture
async def keys() -> DeploymentKeys:
    return DeploymentKeys.generate()


@pytest.fixture
async def listener() -> Listener:
    return Listener()


@pytest.fixture
async def fleet(keys: DeploymentKeys, listener: Listener) -> AsyncIterator[Fleet]:
    fleet = Fleet(
        SluiceConfig.parse({"router": {"worker_silence_s": SILENCE_S}}, source="test"),
        host="127.0.0.1",
        control_port=0,
        keys=keys.of("router"),
        metrics=RouterMetrics(),
        probe_token_id=1,
        recorder=Recorder(time.monotonic),
        lifecycle=Lifecycle(),
    )
    running = asyncio.create_task(fleet.run(listener))
    yield fleet
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def until_linked(fleet: Fleet) -> tuple[Worker, DecodeLink]:
    """Wait for a worker that requests may be sent to, and for the way there."""
    async with asyncio.timeout(10):
        while True:
            for worker in fleet.registry.usable("decode"):
                if (link := fleet.link(worker)) is not None:
                    return worker, link
            await fleet.changed()


async def test_h02_a_link_is_offered_only_once_it_leads_to_the_worker(
    fleet: Fleet, keys: DeploymentKeys
) -> None:
    async with ScriptedWorker("decode-0", fleet.address, keys, silence) as decode:
        _, old = await until_linked(fleet)
        # Given a proven worker that was silent, because this router stood still
        fleet._expire(asyncio.get_running_loop().time() + 100)
        assert not fleet.registry.usable("decode")
        # When it reports again
        fleet._observe(decode.heartbeat())
        (worker,) = fleet.registry.usable("decode")
        # Then nothing can be sent before it is connected to
        assert fleet.link(worker) is None
        _, link = await until_linked(fleet)
        assert link is not old
        # And what is sent arrives
        sampling = SamplingParams(seed=0, max_tokens=1)
        link.send(Generate(RequestId("r"), Attempt(2), (1,), sampling))
        await decode.wait_for(lambda: [g.request_id for g in decode.generates] == ["r"])


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_router_that_stood_still_takes_nobody_for_silent_whose_report_lies_unread(
    fleet: Fleet, keys: DeploymentKeys, listener: Listener, role: Role
) -> None:
    async with ScriptedWorker(
        "other", fleet.address, keys, silence, role=role, heartbeat_interval_s=SILENCE_S / 4
    ):
        while not fleet.registry.usable(role):
            await fleet.changed()
        (worker,) = fleet.registry.usable(role)
        # When nothing runs here for longer than a worker may be silent, again and again
        for _ in range(3):
            time.sleep(SILENCE_S * 1.5)  # noqa: ASYNC251 - the adversary
            await fleet.changed()
        # Then the worker has not been away
        assert fleet.registry.usable(role) == [worker]
        assert fleet.registry.usable(role)[0] is worker
        assert listener.num_lost == 0
