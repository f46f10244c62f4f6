"""A part that fails must end the whole process, or requests wait on a worker that is half dead."""

import asyncio

import pytest

from core.tasks import raise_in_loop, run_until


async def wait_forever() -> None:
    await asyncio.Event().wait()


async def fail() -> None:
    raise ValueError("part failed")


async def test_part_that_fails_ends_all_and_is_raised() -> None:
    with pytest.raises(ValueError, match="part failed"):
        await run_until(asyncio.Event(), wait_forever(), fail())


async def test_callback_that_raises_ends_all_and_is_raised() -> None:
    asyncio.get_running_loop().call_soon(lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        await run_until(asyncio.Event(), wait_forever())


async def test_watched_task_that_fails_ends_all() -> None:
    asyncio.create_task(fail()).add_done_callback(raise_in_loop)
    with pytest.raises(ValueError, match="part failed"):
        await run_until(asyncio.Event(), wait_forever())


async def test_stop_ends_all_without_an_error() -> None:
    stop = asyncio.Event()
    stop.set()
    await run_until(stop, wait_forever())
