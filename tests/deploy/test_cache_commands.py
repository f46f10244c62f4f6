"""An operator reads what each worker's cache holds, and why a reset is not done.

The failure guarded against: "pending" without a reason or a next step, a hit rate that leaves out
the tiers that had most of the tokens, and a wait that never ends.
"""

import asyncio
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Literal

import msgspec
import pytest

from core.ids import Incarnation, WorkerId
from core.messages import CacheState, TierUse
from core.tiers import Tier
from deploy.cli.parser import run
from deploy.commands import cache
from router.cache_api import CacheAPI
from router.cache_control import WorkerCache

TIERS = (
    TierUse(Tier.DEVICE, 3, 100),
    TierUse(Tier.HOST, 10, 60),
    TierUse(Tier.STORAGE, 7, 20),
)
Answer = list[CacheState | None]


def state_of(
    reset: Literal["none", "pending", "done"], *, query_tokens: int = 400, **blocks: int
) -> CacheState:
    counts = {"free": 0, "cached": 0, "fenced": 0, "quarantined": 0} | blocks
    return CacheState(counts, query_tokens, 100, 7, 0, reset, TIERS)


class ScriptedControl:
    """Answers resets and looks of the real API; the last look is repeated."""

    def __init__(self) -> None:
        self.after_reset: Answer = []
        self.looks: list[Answer] = []
        self.num_looks = 0

    async def reset(self) -> list[WorkerCache]:
        return self._caches(self.after_reset)

    async def show(self) -> list[WorkerCache]:
        look = self.looks[min(self.num_looks, len(self.looks) - 1)]
        self.num_looks += 1
        return self._caches(look)

    def _caches(self, answer: Answer) -> list[WorkerCache]:
        return [
            WorkerCache(WorkerId(f"decode-{index}"), "decode", Incarnation("life"), state, 312.4)
            for index, state in enumerate(answer)
        ]


@pytest.fixture
def control() -> ScriptedControl:
    return ScriptedControl()


@pytest.fixture
def url(control: ScriptedControl) -> Iterator[str]:
    """Serve the API over ``control``."""
    api = CacheAPI(control)  # type: ignore[arg-type]

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answer = asyncio.run(api.reset() if self.command == "POST" else api.show())
            self.send_response(answer.status_code)
            self.end_headers()
            self.wfile.write(answer.body)

        do_POST = do_GET  # noqa: N815 - the server's own name

        def log_message(self, *_args: object) -> None:
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_show_tells_what_each_tier_had_of_the_tokens_looked_up(
    control: ScriptedControl, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    control.looks = [[state_of("done", free=5, cached=3), None, state_of("none", query_tokens=0)]]
    assert run(["cache", "show", "--url", url]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:8] == [
        "decode-0: 8 blocks: 5 free, 3 cached",
        "  400 tokens looked up, 45.0% hit: 25.0% device, 15.0% host, 5.0% storage",
        "  device: 3 blocks cached, 100 tokens hit",
        "  host: 10 blocks cached, 60 tokens hit",
        "  storage: 7 blocks that this worker knows of, 20 tokens hit",
        "  7 blocks evicted from the pool",
        "  last reset: done",
        "decode-1: unreachable, last heard of 312 s ago",
    ]
    assert "  no tokens looked up" in lines[8:]


def test_a18_a_pending_reset_says_what_is_in_use_and_how_to_wait(
    control: ScriptedControl, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    busy = state_of("pending", free=5, cached=3, active=8, fenced=2)
    control.after_reset = [state_of("done"), busy]
    control.looks = [control.after_reset]
    assert run(["cache", "reset", "--url", url]) == 1
    done, pending, advice = capsys.readouterr().out.splitlines()
    assert done == "decode-0: done"
    assert pending.startswith("decode-1: pending: nothing old can be hit")
    assert pending.endswith("some of 2 fenced, 8 active blocks")
    assert "sluice cache reset --wait SECONDS" in advice
    assert control.num_looks == 1


def test_a18_a_wait_ends_with_the_last_block(
    control: ScriptedControl, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    busy = state_of("pending", fenced=2)
    control.after_reset = [busy]
    control.looks = [[busy], [None], [state_of("done", free=2)]]
    assert run(["cache", "reset", "--wait", "3600", "--url", url]) == 0
    assert capsys.readouterr().out == "decode-0: done\n"


class Clock:
    """Time that passes only while somebody sleeps."""

    def __init__(self) -> None:
        self._now = 0.0

    def monotonic(self) -> float:
        return self._now

    def sleep(self, seconds: float) -> None:
        self._now += seconds


def test_a18_a_wait_that_was_too_short_says_so(
    control: ScriptedControl,
    url: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cache, "time", Clock())
    control.after_reset = [state_of("pending", quarantined=1)]
    control.looks = [control.after_reset, [None]]
    assert run(["cache", "reset", "--wait", "0.2", "--url", url]) == 1
    pending, advice = capsys.readouterr().out.splitlines()
    assert pending.endswith("it did not say which blocks")
    assert advice.startswith("waited 0.2 s; look again")


def test_a18_a_new_life_during_the_wait_was_not_reset(
    control: ScriptedControl, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    control.after_reset = [state_of("pending", fenced=2)]
    control.looks = [[state_of("none", free=9)]]
    assert run(["cache", "reset", "--wait", "60", "--url", url]) == 1
    assert capsys.readouterr().out.startswith("decode-0: unreachable\nreset again when all answer")


def test_a_reset_tells_how_long_a_worker_has_been_silent_and_when_it_is_asked_no_more(
    control: ScriptedControl, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    control.after_reset = [state_of("done", free=2), None]
    assert run(["cache", "reset", "--url", url]) == 1
    done, lost, advice = capsys.readouterr().out.splitlines()
    assert (done, lost) == ("decode-0: done", "decode-1: unreachable, last heard of 312 s ago")
    assert advice.endswith("until a new process has its name or the router starts anew")


def test_a18_a_reset_waits_for_storage_and_tells_that_it_failed(
    control: ScriptedControl, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    waiting, failed = (
        msgspec.structs.replace(state_of("done", free=2), storage=storage)
        for storage in ("pending", "failed")
    )
    control.after_reset = [waiting]
    control.looks = [[waiting]]
    assert run(["cache", "reset", "--url", url]) == 1
    assert capsys.readouterr().out.startswith("decode-0: pending: storage has not answered yet")

    control.looks = [[waiting], [failed]]
    control.num_looks = 0
    assert run(["cache", "reset", "--wait", "60", "--url", url]) == 1
    assert capsys.readouterr().out.startswith("decode-0: storage_failed: a worker that starts")

    assert run(["cache", "show", "--url", url]) == 0
    assert "  last reset: done, in storage: failed" in capsys.readouterr().out.splitlines()
