"""Clients that stream all the time and check what they get, token by token."""

import asyncio
import itertools
import threading
import time
from collections.abc import Sequence
from types import TracebackType

import httpx

from tests.integration.streams import stream

PAUSE_S = 0.2
"""Between two requests of a client: what starts meanwhile needs the processor, too."""
REQUEST_TIMEOUT_S = 90.0
_salts = itertools.count()


class Load:
    """Use as ``with Load(...) as load``; at its end every answer was right, or it fails.

    A client asks once: what fails is told, not tried again.
    """

    def __init__(
        self,
        url: str,
        prompts: Sequence[list[int]],
        expected: Sequence[list[int]],
        *,
        are_new: bool = False,
    ) -> None:
        """Have one client for each prompt; where it asks for it, no prefix of it is found."""
        self._url = url
        self._are_new = are_new
        self._prompts = prompts
        self._expected = expected
        self._leave = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)
        self.num_right = 0
        self.failures: list[str] = []

    def __enter__(self) -> "Load":
        self._thread.start()
        self.wait_for_more()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._leave.set()
        self._thread.join(REQUEST_TIMEOUT_S)
        if error is None:
            assert not self._thread.is_alive(), "a request hangs"
            assert self.failures == []

    def wait_for_more(self, number: int = 4) -> None:
        """Return when ``number`` further requests were answered; fail on a wrong answer."""
        wanted = self.num_right + number
        deadline = time.monotonic() + REQUEST_TIMEOUT_S
        while self.num_right < wanted:
            assert self.failures == []
            assert time.monotonic() < deadline, f"{self.num_right} of {wanted} answers"
            time.sleep(0.05)

    async def _run(self) -> None:
        async with httpx.AsyncClient(base_url=self._url, timeout=REQUEST_TIMEOUT_S) as client:
            await asyncio.gather(*(self._ask(client, n) for n in range(len(self._prompts))))

    async def _ask(self, client: httpx.AsyncClient, number: int) -> None:
        expected = self._expected[number]
        while not self._leave.is_set():
            salt = {"cache_salt": f"salt-{next(_salts)}"} if self._are_new else {}
            try:
                answer = await stream(
                    client, self._prompts[number], len(expected), leave_after=None, **salt
                )
                assert answer == expected, f"other tokens: {answer} instead of {expected}"
            except (AssertionError, httpx.HTTPError) as error:
                self.failures.append(f"client {number}: {type(error).__name__}: {error}"[:500])
            else:
                self.num_right += 1
            await asyncio.sleep(PAUSE_S)
