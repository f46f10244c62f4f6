"""Running the parts of a process together: all until one ends or any callback fails, then none."""

import asyncio
from collections.abc import Coroutine
from typing import Any


async def run_until(stop: asyncio.Event, *parts: Coroutine[Any, Any, None]) -> None:
    """Run ``parts`` until ``stop`` is set or one of them ends; on return none runs any more.

    A callback of this loop that raises ends them too: a worker whose state machine broke must not
    go on as if nothing had happened.

    Raises:
        Exception: what the part or callback that ended first raised.
    """
    loop = asyncio.get_running_loop()
    crash: asyncio.Future[None] = loop.create_future()

    def fail(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if isinstance(error, Exception) and not crash.done():
            crash.set_exception(error)
        else:
            loop.default_exception_handler(context)

    before = loop.get_exception_handler()
    loop.set_exception_handler(fail)
    tasks = [asyncio.create_task(part) for part in parts]
    stopping = asyncio.create_task(stop.wait())
    try:
        done, _ = await asyncio.wait({stopping, crash, *tasks}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        loop.set_exception_handler(before)
        for task in (stopping, *tasks):
            task.cancel()
        crash.cancel()
        await asyncio.gather(stopping, crash, *tasks, return_exceptions=True)
    for task in done:
        task.result()


def raise_in_loop(task: "asyncio.Task[Any]") -> None:
    """Done-callback that hands a task's failure to the loop, and so to ``run_until``."""
    if not task.cancelled():
        task.result()
