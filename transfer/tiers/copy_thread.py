"""A thread that copies bytes, so that the event loop does not."""

import asyncio
import logging
import threading
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import TypeVar

log = logging.getLogger(__name__)
T = TypeVar("T")


class CopyThread:
    """Runs pieces of work one after the other and reports each to the loop it was created in.

    A daemon: a copy that hangs must not keep the process from ending.
    """

    def __init__(self, name: str) -> None:
        self._loop = asyncio.get_running_loop()
        self._work: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run_all, name=name, daemon=True)
        self._thread.start()

    def run(self, work: Callable[[], T]) -> "asyncio.Future[T]":
        """Queue ``work``; the future has its result, or what it raised.

        ``work`` runs to its end even if nobody waits for the future any more.
        """
        future: asyncio.Future[T] = self._loop.create_future()

        def run() -> None:
            try:
                result = work()
            except Exception as error:  # noqa: BLE001 - handed to whoever waits for the future
                self._report(partial(_fail, future, error))
            else:
                self._report(partial(_succeed, future, result))

        self._work.put(run)
        return future

    async def close(self, *, timeout_s: float) -> bool:
        """End the thread after what is queued; return whether it ended within ``timeout_s``."""
        self._work.put(None)
        await asyncio.to_thread(self._thread.join, timeout_s)
        return not self._thread.is_alive()

    def _run_all(self) -> None:
        # Waits without a deadline: ``close`` ends it.
        while (work := self._work.get()) is not None:
            work()

    def _report(self, deliver: Callable[[], None]) -> None:
        try:
            self._loop.call_soon_threadsafe(deliver)
        except RuntimeError:  # the loop is closed: nobody waits
            log.debug("event=copy_ended_after_the_loop")


def _succeed(future: "asyncio.Future[T]", result: T) -> None:
    if not future.done():  # cancelled: nobody waits
        future.set_result(result)


def _fail(future: "asyncio.Future[T]", error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
