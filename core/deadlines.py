"""Doing what a pure state machine wants done at a time, no earlier and whatever else happens."""

import asyncio
from collections.abc import Callable


async def keep_deadlines(
    next_at: Callable[[], float | None],
    changed: asyncio.Event,
    on_due: Callable[[float], None],
) -> None:
    """Call ``on_due`` with the time whenever ``next_at()`` has come, until cancelled.

    Args:
        next_at: The next deadline, in seconds of the running loop's clock; None: there is none.
        changed: Set by whoever may have changed what ``next_at`` returns.
        on_due: Must move the deadline, or it is called again at once.
    """
    clock = asyncio.get_running_loop().time
    while True:
        changed.clear()
        deadline = next_at()
        wait_s = None if deadline is None else max(0.0, deadline - clock())
        try:
            async with asyncio.timeout(wait_s):
                await changed.wait()
        except TimeoutError:
            on_due(clock())
