"""What is due is done although nothing else happens; a new, earlier deadline is not missed."""

import asyncio

from core.deadlines import keep_deadlines


async def test_what_is_due_is_done_although_nothing_happens() -> None:
    loop = asyncio.get_running_loop()
    deadlines = [loop.time(), loop.time() + 0.01]
    done = asyncio.Event()

    def on_due(now: float) -> None:
        assert now >= deadlines.pop(0)
        if not deadlines:
            done.set()

    task = asyncio.create_task(
        keep_deadlines(lambda: deadlines[0] if deadlines else None, asyncio.Event(), on_due)
    )
    await done.wait()
    task.cancel()


async def test_a_deadline_that_comes_up_during_the_wait_is_kept() -> None:
    deadlines: list[float] = []
    changed, done = asyncio.Event(), asyncio.Event()

    def on_due(now: float) -> None:
        assert now >= deadlines.pop()
        done.set()

    task = asyncio.create_task(
        keep_deadlines(lambda: deadlines[0] if deadlines else None, changed, on_due)
    )
    await asyncio.sleep(0)  # nothing is due, for ever
    deadlines.append(asyncio.get_running_loop().time())
    changed.set()
    await done.wait()
    task.cancel()
