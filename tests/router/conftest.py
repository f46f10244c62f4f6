"""A real router on real ports, and scripted workers beside it."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI

from core.channel import DeploymentKeys
from core.config import SluiceConfig
from core.lifecycle import Lifecycle
from router import cache_control, trace_control
from router.connections import BoundedConnection
from router.server import RouterAddress, RouterContext, run_router
from router.tokenizer import Tokenizer
from tests.router.model_folder import make_model_folder
from tests.router.raw_connections import SendInPieces
from tests.router.scripted_worker import Script, ScriptedWorker

MODEL = "test-model"
WAIT_S = 60.0
"""Bounds a wait for what comes: a busy machine takes its time."""


@dataclass
class RunningRouter:
    """A router, its clients, and the means to start workers that end with it."""

    address: RouterAddress
    keys: DeploymentKeys
    http: httpx.AsyncClient
    openai: AsyncOpenAI
    tokenizer: Tokenizer
    stack: AsyncExitStack
    lifecycle: Lifecycle
    serving: asyncio.Task[None]
    operator: dict[str, str] = field(default_factory=dict)
    """Headers of who may see the workers."""

    async def start_worker(
        self, script: Script, *, worker_id: str = "decode-0", wait: bool = True, **options: Any
    ) -> ScriptedWorker:
        """Start a worker; wait until the router would send it requests."""
        worker = ScriptedWorker(worker_id, self.address.control, self.keys, script, **options)
        await self.stack.enter_async_context(worker)
        if wait:
            await self.until_state(worker_id, "ready")
        return worker

    async def until_state(self, worker_id: str, state: str | None) -> None:
        """Wait until ``/status`` shows the worker in ``state``; None: does not show it alive."""
        async with asyncio.timeout(WAIT_S):
            while True:
                status = (await self.http.get("/status", headers=self.operator)).json()
                alive = [w for w in status["workers"] if w["state"] != "lost"]
                states = {w["worker_id"]: w["state"] for w in alive}
                if states.get(worker_id) == state:
                    return
                await asyncio.sleep(0.02)

    async def until_idle(self) -> None:
        """Wait until the router has no pending request."""
        async with asyncio.timeout(WAIT_S):
            while True:
                status = (await self.http.get("/status", headers=self.operator)).json()
                if not status["pending_requests"]:
                    return
                await asyncio.sleep(0.02)

    async def metric(self, sample: str) -> float:
        """Return the sum over the samples in ``/metrics`` that begin with ``sample``."""
        lines = (await self.http.get("/metrics")).text.splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(sample))

    def ids(self, text: str) -> list[int]:
        """Return the token ids of ``text``."""
        return self.tokenizer.encode(text, add_special_tokens=False)


StartRouter = Callable[..., Awaitable[RunningRouter]]


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers answer in time, however long the machine takes; a test may set another bound."""
    for module in (cache_control, trace_control):
        monkeypatch.setattr(module, "ANSWER_TIMEOUT_S", WAIT_S)


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder without weights."""
    return make_model_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def tokenizer(model_path: Path) -> Tokenizer:
    """The folder's tokenizer."""
    return Tokenizer.load(model_path)


@pytest.fixture
async def start_router(model_path: Path, tokenizer: Tokenizer) -> AsyncIterator[StartRouter]:
    """Start routers with settings of the ``router`` section; they end with the test."""
    async with AsyncExitStack() as stack:

        async def start(
            *, path: Path = model_path, security: dict[str, Any] | None = None, **settings: Any
        ) -> RunningRouter:
            running = _running_router(path, tokenizer, settings, security or {})
            return await stack.enter_async_context(running)

        yield start


@pytest.fixture
async def router(start_router: StartRouter) -> RunningRouter:
    """A router with short bounds."""
    return await start_router()


@pytest.fixture
def send_in_pieces(monkeypatch: pytest.MonkeyPatch) -> SendInPieces:
    """Send to the test's routers so that what is sent in two pieces is received in two."""
    taken: asyncio.Queue[bytes] = asyncio.Queue()
    take = BoundedConnection.data_received

    def tell_and_take(connection: BoundedConnection, data: bytes) -> None:
        taken.put_nowait(data)
        take(connection, data)

    async def send(writer: asyncio.StreamWriter, *pieces: bytes) -> None:
        while not taken.empty():
            taken.get_nowait()
        for piece in pieces:
            writer.write(piece)
            async with asyncio.timeout(20):
                assert await taken.get() == piece

    monkeypatch.setattr(BoundedConnection, "data_received", tell_and_take)
    return send


@asynccontextmanager
async def _running_router(
    model_path: Path, tokenizer: Tokenizer, settings: dict[str, Any], security: dict[str, Any]
) -> AsyncIterator[RunningRouter]:
    section = {"port": 0, "admission_wait_s": 1.0, "worker_silence_s": 1.0} | settings
    keys = DeploymentKeys.generate()
    ready: asyncio.Future[RouterAddress] = asyncio.get_running_loop().create_future()
    context = RouterContext(
        config=SluiceConfig.parse({"router": section, "security": security}, source="test"),
        model_path=model_path,
        served_name=MODEL,
        keys=keys.of("router"),
        host="127.0.0.1",
        on_ready=ready.set_result,
    )
    lifecycle = Lifecycle()
    serving = asyncio.create_task(run_router(context, lifecycle))
    await asyncio.wait({ready, serving}, return_when=asyncio.FIRST_COMPLETED)
    if serving.done():
        serving.result()
    address = ready.result()
    async with AsyncExitStack() as stack:
        http = await stack.enter_async_context(httpx.AsyncClient(base_url=address.http, timeout=30))
        client = AsyncOpenAI(base_url=f"{address.http}/v1", api_key="none", max_retries=0)
        await stack.enter_async_context(client)
        yield RunningRouter(address, keys, http, client, tokenizer, stack, lifecycle, serving)
    lifecycle.stop.set()
    async with asyncio.timeout(WAIT_S):
        await serving
