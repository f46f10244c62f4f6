"""An engine that stands still is seen, though everything around it goes on.

The failure guarded against: a worker that reports, answers pings and looks healthy to Ray while its
device hangs, so that its requests wait for ever and nobody starts it anew.
"""

import asyncio
import multiprocessing
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from core.channel import ClientChannel, DeploymentKeys, ServerChannel
from core.config import SluiceConfig
from core.ids import Attempt, RequestId, WorkerId, new_incarnation
from core.lifecycle import WorkerHealth
from core.messages import Generate, Heartbeat, Hello, OutputBatch, Welcome
from core.sampling import SamplingParams
from core.worker_context import WorkerContext
from tests.fork_server import forked_process
from tests.integration.frozen_worker import run
from tests.integration.models import tiny_model

pytestmark = [pytest.mark.slow]

KEYS = DeploymentKeys.generate()
PROGRESS_TIMEOUT_S = 2.0
START_TIMEOUT_S = 90.0


@dataclass
class Worker:
    """The worker's process as its router and its supervisor reach it."""

    orders: Connection
    heartbeat: Heartbeat
    channel: ClientChannel
    control: ServerChannel

    async def order(self, name: str) -> Any:
        self.orders.send(name)
        assert await asyncio.to_thread(self.orders.poll, 60), f"{name}: no answer"
        return self.orders.recv()

    async def health(self) -> WorkerHealth:
        return await self.order("health")

    def generate(self, name: str) -> None:
        sampling = SamplingParams(seed=0, max_tokens=4, temperature=0.0)
        self.channel.send(Generate(RequestId(name), Attempt(1), (1, 2, 3), sampling))

    async def finished(self) -> str:
        """Return which request has ended."""
        while True:
            message = await self.channel.receive()
            assert isinstance(message, OutputBatch)
            for output in message.outputs:
                if output.finish_reason is not None:
                    return output.request_id

    async def probe(self, path: str) -> tuple[int, str]:
        url = self.heartbeat.metrics_address.removesuffix("/metrics") + path
        return await asyncio.to_thread(get, url)


def get(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:  # noqa: S310 - our own worker
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


@asynccontextmanager
async def started(model_path: Path) -> AsyncIterator[Worker]:
    """Start the worker, and be its router."""
    incarnation = new_incarnation()
    control = ServerChannel(
        host="127.0.0.1",
        keys=KEYS.of("router"),
        incarnation=incarnation,
        welcome=lambda *_: Welcome(worker_id=WorkerId("router"), incarnation=incarnation),
    )
    sections: dict[str, object] = {
        "model": {"dtype": "float32"},
        "cache": {"memory_gib": 0.05},
        "deploy": {"prefill": 0, "progress_timeout_s": PROGRESS_TIMEOUT_S},
    }
    context = WorkerContext(
        worker_id=WorkerId("decode-0"),
        config=SluiceConfig.parse(sections, source="test").for_role("decode"),
        model_path=model_path,
        served_name="model",
        router_address=control.address,
        keys=KEYS.of("decode"),
        host="127.0.0.1",
    )
    ours, theirs = multiprocessing.Pipe()
    process = forked_process(run, (context, theirs))
    process.start()
    channel = None
    try:
        async with asyncio.timeout(START_TIMEOUT_S):
            _, heartbeat = await control.receive()
        assert isinstance(heartbeat, Heartbeat)
        listening = asyncio.create_task(keep_receiving(control))
        channel = ClientChannel(
            heartbeat.address,
            keys=KEYS.of("router"),
            server="decode",
            hello=Hello(name="router", incarnation=incarnation),
        )
        await channel.connect()
        worker = Worker(ours, heartbeat, channel, control)
        yield worker
        assert (await worker.order("stop")).error is None
        listening.cancel()
    finally:
        if channel is not None:
            channel.close()
        control.close()
        await asyncio.to_thread(process.join, 30)
        process.kill()


async def keep_receiving(control: ServerChannel) -> None:
    while True:
        await control.receive()


async def until_silent(worker: Worker, limit_s: float) -> WorkerHealth:
    async with asyncio.timeout(60):
        while (health := await worker.health()).silence_s <= limit_s:  # noqa: ASYNC110 - from outside
            await asyncio.sleep(0.2)
    return health


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model("llama", tmp_path_factory.mktemp("models"))


async def test_an_engine_that_stands_still_is_silence_and_no_probe_is_fooled(
    model_path: Path,
) -> None:
    async with started(model_path) as worker, asyncio.timeout(100):
        # Given a worker that has served, and idles for longer than a step may take
        worker.generate("a")
        assert await worker.finished() == "a"
        await asyncio.sleep(PROGRESS_TIMEOUT_S + 1)
        assert (await worker.health()).silence_s <= PROGRESS_TIMEOUT_S
        assert (await worker.probe("/livez"))[0] == 200

        # When a step comes to stand still, then its age is the silence, whatever else goes on
        await worker.order("close")
        worker.generate("b")
        first = await until_silent(worker, PROGRESS_TIMEOUT_S)
        later = await until_silent(worker, first.silence_s + 0.5)
        assert (first.state, first.is_idle) == ("ready", False)
        assert later.num_steps == first.num_steps
        status, text = await worker.probe("/livez")
        assert status == 503
        assert "no progress for" in text
        assert "deploy.progress_timeout_s" in text

        # And when it goes on, the worker is well again, and the request has all its tokens
        await worker.order("open")
        assert await worker.finished() == "b"
        assert (await worker.health()).silence_s <= PROGRESS_TIMEOUT_S
        assert (await worker.probe("/livez"))[0] == 200
