"""Decode workers that are killed or frozen by a signal, in the middle of streams.

A killed process closes its connections; a frozen one keeps them, says nothing, and when it wakes
goes on sending tokens of attempts that were given up long ago.
"""

import asyncio
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from pathlib import Path

import pytest

from tests.router.conftest import MODEL, WAIT_S, RunningRouter, StartRouter
from tests.router.worker_process import FIRST_TOKEN_ID, HALTS, command

NUM_STREAMS = 16
NUM_TOKENS = 80
StartWorker = Callable[[str], Awaitable[asyncio.subprocess.Process]]


@pytest.fixture
async def router(start_router: StartRouter) -> RunningRouter:
    """A router that takes no process for lost which only waits for a processor."""
    return await start_router(worker_silence_s=3.0, admission_wait_s=30.0)


@pytest.fixture
async def start_worker(router: RunningRouter) -> AsyncIterator[StartWorker]:
    """Start worker processes that end with the test."""
    async with AsyncExitStack() as stack:

        async def start(worker_id: str) -> asyncio.subprocess.Process:
            process = await asyncio.create_subprocess_exec(
                *command(router.address.control, worker_id, router.keys),
                cwd=Path(__file__).parents[2],
            )
            stack.push_async_callback(_end, process)
            await router.until_state(worker_id, "ready")
            return process

        yield start


async def _end(process: asyncio.subprocess.Process) -> None:
    with suppress(ProcessLookupError):
        process.kill()
    await process.wait()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
async def test_h03_streams_of_a_lost_process_go_on_elsewhere(
    router: RunningRouter, start_worker: StartWorker, how: signal.Signals
) -> None:
    # Given two workers with eight streams each, all of them under way
    first, second = await start_worker(HALTS), await start_worker("decode-1")
    expected = router.tokenizer.decode(range(FIRST_TOKEN_ID, FIRST_TOKEN_ID + NUM_TOKENS))
    under_way = asyncio.Semaphore(0)

    async def stream() -> tuple[str, str | None]:
        chunks = await router.openai.completions.create(
            model=MODEL, prompt="a", max_tokens=NUM_TOKENS, stream=True
        )
        text = ""
        async for chunk in chunks:
            under_way.release()
            text += chunk.choices[0].text
            reason = chunk.choices[0].finish_reason
        return text, reason

    streams = [asyncio.create_task(stream()) for _ in range(NUM_STREAMS)]
    for _ in range(NUM_STREAMS * 4):
        await under_way.acquire()

    # When one is lost
    first.send_signal(how)

    # Then every stream ends with exactly its text
    async with asyncio.timeout(WAIT_S):
        results = await asyncio.gather(*streams)
    assert set(results) == {(expected, "length")}
    num_retries = await router.metric("sluice_retries_total")
    assert 0 < num_retries <= NUM_STREAMS
    await router.until_state(HALTS, None)

    # And a frozen one that wakes is taken back, and its late tokens harm nobody
    if how is signal.SIGSTOP:
        first.send_signal(signal.SIGCONT)
        await router.until_state(HALTS, "ready")
        second.kill()
        await router.until_state("decode-1", None)
        assert await stream() == (expected, "length")
