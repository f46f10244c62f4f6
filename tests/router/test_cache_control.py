"""An operator who resets the caches must know what has become of each of them.

The failure guarded against: "done" while a worker still has, or may still have, what was to be
forgotten, because it was busy, silent, or answered an older question.
"""

import asyncio
from typing import Literal

import msgspec
import pytest

from core.cache_epoch import epoch_after
from core.ids import Incarnation, WorkerId
from core.messages import (
    AnyMessage,
    CacheReport,
    CacheState,
    Heartbeat,
    ResetCache,
    TierUse,
    WorkerLoad,
)
from router import cache_control
from router.cache_control import CacheControl
from tests.router.conftest import WAIT_S, RunningRouter, StartRouter
from tests.router.scripted_worker import silence

STATES = ("free", "active", "receiving", "cached", "fenced", "quarantined", "leased")


def state_of(reset: Literal["none", "pending", "done"], **blocks: int) -> CacheState:
    return CacheState(
        blocks=dict.fromkeys(STATES, 0) | blocks,
        query_tokens=400,
        hit_tokens=100,
        evictions=7,
        resets=1,
        reset=reset,
        tiers=(TierUse("device", blocks.get("cached", 0), 100),),
    )


async def reset(router: RunningRouter) -> tuple[int, str, dict[str, str]]:
    response = await router.http.post("/v1/cache/reset")
    body = response.json()
    return (
        response.status_code,
        body["status"],
        {worker["worker_id"]: worker["status"] for worker in body["workers"]},
    )


async def until_reset(
    router: RunningRouter, expected: tuple[int, str, dict[str, str]], *, mute: str = ""
) -> None:
    """Reset until it is told so: a worker that answers may take longer than is waited here.

    The one that does not is never told as anything else than unreachable.
    """
    async with asyncio.timeout(WAIT_S):
        while (told := await reset(router)) != expected:
            assert told[2].get(mute, "unreachable") == "unreachable"


async def test_a18_a_reset_is_done_when_every_worker_says_so(router: RunningRouter) -> None:
    for worker_id, role in (("decode-0", "decode"), ("prefill-0", "prefill")):
        await router.start_worker(
            silence, worker_id=worker_id, role=role, cache_state=state_of("done", free=9)
        )
    assert await reset(router) == (200, "done", {"decode-0": "done", "prefill-0": "done"})


async def test_a18_a_reset_is_pending_while_one_worker_has_withheld_blocks(
    router: RunningRouter,
) -> None:
    await router.start_worker(silence, worker_id="decode-0", cache_state=state_of("done", free=9))
    busy = await router.start_worker(
        silence, worker_id="decode-1", cache_state=state_of("pending", fenced=3)
    )
    code, status, workers = await reset(router)
    assert (code, status) == (202, "pending")
    assert workers == {"decode-0": "done", "decode-1": "pending"}

    # When its blocks are free the same question, asked again, is answered so
    busy.cache_state = state_of("done", free=9)
    shown = (await router.http.get("/v1/cache")).json()["workers"]
    assert [worker["reset"] for worker in shown] == ["done", "done"]
    assert len(busy.cache_questions) == 2


async def test_a_worker_that_does_not_answer_is_unreachable_and_named(
    start_router: StartRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_control, "ANSWER_TIMEOUT_S", 0.3)
    router = await start_router()
    await router.start_worker(silence, worker_id="decode-0", cache_state=state_of("done"))
    mute = await router.start_worker(silence, worker_id="decode-1", cache_state=None)
    await until_reset(
        router,
        (202, "unreachable", {"decode-0": "done", "decode-1": "unreachable"}),
        mute="decode-1",
    )
    # It fell silent for good, and may come back with its cache as it was: still told
    mute.frozen = True
    await router.until_state("decode-1", None)
    assert (await reset(router))[2]["decode-1"] == "unreachable"
    shown = {w["worker_id"]: w for w in (await router.http.get("/v1/cache")).json()["workers"]}
    assert shown.keys() == {"decode-0", "decode-1"}
    assert shown["decode-1"]["status"] == "unreachable"
    # Until another life of it takes its place
    await mute.die()
    await router.start_worker(silence, worker_id="decode-1", cache_state=state_of("done"))
    await until_reset(router, (200, "done", {"decode-0": "done", "decode-1": "done"}))


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_worker_that_has_drained_and_left_has_nothing_to_forget(
    router: RunningRouter, role: Literal["prefill", "decode"]
) -> None:
    """As after scaling down: no reset could be done any more, since it never comes back."""
    await router.start_worker(silence, worker_id="decode-0", cache_state=state_of("done"))
    worker = await router.start_worker(
        silence, worker_id="leaving", role=role, cache_state=state_of("done")
    )
    worker.state = "draining"
    await router.until_state("leaving", "draining")
    assert await reset(router) == (200, "done", {"decode-0": "done", "leaving": "done"})
    await worker.die()
    await router.until_state("leaving", None)

    assert await reset(router) == (200, "done", {"decode-0": "done"})
    shown = (await router.http.get("/v1/cache")).json()["workers"]
    assert [worker["worker_id"] for worker in shown] == ["decode-0"]


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_worker_that_was_taken_for_gone_while_it_drained_is_asked_again(
    start_router: StartRouter,
    monkeypatch: pytest.MonkeyPatch,
    role: Literal["prefill", "decode"],
) -> None:
    monkeypatch.setattr(cache_control, "ANSWER_TIMEOUT_S", 0.3)
    router = await start_router()
    worker = await router.start_worker(
        silence, worker_id="leaving", role=role, cache_state=state_of("pending")
    )
    worker.state = "draining"
    await router.until_state("leaving", "draining")
    worker.frozen = True
    await router.until_state("leaving", None)
    assert await reset(router) == (200, "done", {})
    worker.frozen = False
    await router.until_state("leaving", "draining")
    await until_reset(router, (202, "pending", {"leaving": "pending"}))


async def test_a_life_that_did_not_drain_is_told_though_an_earlier_one_did(
    start_router: StartRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_control, "ANSWER_TIMEOUT_S", 0.3)
    router = await start_router()
    first = await router.start_worker(silence, cache_state=state_of("done"))
    first.state = "draining"
    await router.until_state("decode-0", "draining")
    second = await router.start_worker(silence, cache_state=state_of("done"))
    await first.die()
    await until_reset(router, (200, "done", {"decode-0": "done"}))
    await second.die()
    await router.until_state("decode-0", None)
    assert await reset(router) == (202, "unreachable", {"decode-0": "unreachable"})


async def test_how_long_a_worker_was_silent_is_told_as_of_the_question(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cache_control, "ANSWER_TIMEOUT_S", 0.05)
    now = 10.0
    control = CacheControl(
        lambda _client, _message: None, incarnation=Incarnation("a"), clock=lambda: now
    )
    control.heard(b"0", beat_of("decode-0", ""))
    now = 40.0
    control.heard(b"1", beat_of("decode-1", ""))
    now = 41.5
    assert [cache.silent_s for cache in await control.show()] == [31.5, 1.5]


async def test_to_forget_a_life_is_not_to_forget_the_one_that_took_its_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cache_control, "ANSWER_TIMEOUT_S", 0.05)
    control = CacheControl(lambda _client, _message: None, incarnation=Incarnation("a"))
    beat = beat_of("decode-0", "")
    control.heard(b"0", msgspec.structs.replace(beat, incarnation=Incarnation("later")))
    control.forget(beat.worker_id, beat.incarnation)
    assert [cache.incarnation for cache in await control.show()] == ["later"]
    control.forget(beat.worker_id, Incarnation("later"))
    assert await control.show() == []


async def test_show_tells_blocks_hit_rate_and_tiers_of_each_worker(router: RunningRouter) -> None:
    await router.start_worker(
        silence, worker_id="decode-0", cache_state=state_of("none", free=5, cached=3)
    )
    (worker,) = (await router.http.get("/v1/cache")).json()["workers"]
    assert worker["status"] == "ok"
    assert (worker["blocks"]["free"], worker["blocks"]["cached"]) == (5, 3)
    assert (worker["hit_rate"], worker["evictions"], worker["reset"]) == (0.25, 7, "none")
    assert worker["tiers"] == [{"tier": "device", "blocks": 3, "hit_tokens": 100}]


async def test_a_deployment_without_workers_has_nothing_to_forget(router: RunningRouter) -> None:
    assert await reset(router) == (200, "done", {})


async def test_a_late_answer_and_one_of_a_dead_life_are_dropped() -> None:
    sent: list[AnyMessage] = []
    control = CacheControl(
        lambda _client, message: sent.append(message), incarnation=Incarnation("f00d")
    )
    beat = Heartbeat(WorkerId("decode-0"), "decode", "life-2", "tcp://x", "m", 1, None)  # type: ignore[arg-type]
    control.heard(b"client", beat)
    asking = asyncio.create_task(control.reset())
    await asyncio.sleep(0)
    (question,) = sent

    def answer(number: int, life: str) -> CacheReport:
        return CacheReport(number, WorkerId("decode-0"), "decode", life, state_of("done"))  # type: ignore[arg-type]

    assert not control.take(answer(question.number + 1, "life-2"))  # type: ignore[union-attr]
    assert not control.take(answer(question.number, "life-1"))  # type: ignore[union-attr]
    assert control.take(answer(question.number, "life-2"))  # type: ignore[union-attr]
    (cache,) = await asking
    assert cache.state == state_of("done")
    assert not control.take(answer(question.number, "life-2"))  # type: ignore[union-attr]


async def test_a18_all_workers_begin_one_epoch_newer_than_any_they_know_of() -> None:
    sent: list[AnyMessage] = []
    control = CacheControl(
        lambda _client, message: sent.append(message), incarnation=Incarnation("f00d")
    )
    known = epoch_after(epoch_after("", by="another"), by="another")
    for worker_id, epoch in (("decode-0", ""), ("decode-1", known), ("decode-2", "zzz")):
        beat = Heartbeat(
            WorkerId(worker_id),
            "decode",
            worker_id,
            "tcp://x",
            "m",
            1,
            None,
            cache_epoch=epoch,  # type: ignore[arg-type]
        )
        control.heard(worker_id.encode(), beat)

    resets = [asyncio.create_task(control.reset()) for _ in range(2)]
    await asyncio.sleep(0)

    first, second = sent[:3], sent[3:]
    (one,) = {message.epoch for message in first}  # type: ignore[union-attr]
    (two,) = {message.epoch for message in second}  # type: ignore[union-attr]
    assert known < one < two
    for reset in resets:
        reset.cancel()


def beat_of(worker_id: str, epoch: str) -> Heartbeat:
    incarnation = Incarnation(worker_id)
    return Heartbeat(
        WorkerId(worker_id),
        "decode",
        incarnation,
        "tcp://x",
        "m",
        1,
        WorkerLoad(),
        cache_epoch=epoch,
    )


@pytest.mark.parametrize("missed", ["none", "the newer", "both"])
async def test_a18_two_routers_that_reset_at_once_leave_all_workers_in_one_epoch(
    missed: str,
) -> None:
    """The newest wins at each worker; one that a router did not reach is told again."""
    now = 0.0
    epochs = {"decode-0": epoch_after("", by="old"), "decode-1": epoch_after("", by="old")}
    told: list[tuple[str, str]] = []

    def deliver(client: bytes, message: AnyMessage) -> None:
        assert isinstance(message, ResetCache)
        worker = client.decode()
        told.append((worker, message.epoch))
        epochs[worker] = max(epochs[worker], message.epoch)

    routers = {
        name: CacheControl(deliver, incarnation=Incarnation(name), clock=lambda: now)
        for name in ("aaa", "bbb")
    }

    def report(unheard: dict[str, set[str]]) -> None:
        for name, router in routers.items():
            for worker, epoch in list(epochs.items()):
                if name not in unheard.get(worker, set()):
                    router.heard(worker.encode(), beat_of(worker, epoch))

    # When one of the workers is not known to one router, or to both, at the time of the resets
    unheard = {
        "decode-1": {"none": set[str](), "the newer": {"bbb"}, "both": {"aaa", "bbb"}}[missed]
    }
    report(unheard)
    resets = [asyncio.create_task(router.reset()) for router in routers.values()]
    await asyncio.sleep(0)
    for _ in range(3):
        report(unheard)
        now += 1.0

    # Then, when it is, all are soon in the epoch of the greater router, and nobody is told any more
    for _ in range(8):
        report({})
        now += 1.0
    assert set(epochs.values()) == {epoch_after(epoch_after("", by="old"), by="bbb")}
    num_told = len(told)
    assert num_told <= {"none": 4, "the newer": 5, "both": 4}[missed]
    for _ in range(20):
        report({})
        now += 1.0
    assert len(told) == num_told
    for reset in resets:
        reset.cancel()


async def test_a_worker_without_tiers_is_never_told_again() -> None:
    """It names no epoch, and would lose a warm cache each time."""
    now = 0.0
    told: list[AnyMessage] = []
    control = CacheControl(
        lambda _, message: told.append(message), incarnation=Incarnation("a"), clock=lambda: now
    )
    for _ in range(20):
        control.heard(b"0", beat_of("decode-0", epoch_after("", by="old")))
        control.heard(b"1", beat_of("decode-1", ""))
        now += 1.0
    assert told == []


@pytest.mark.parametrize(
    ("storage", "code", "status"),
    [
        ("done", 200, "done"),
        ("pending", 202, "pending"),
        ("failed", 202, "storage_failed"),
    ],
)
async def test_a18_a_reset_that_storage_has_not_taken_is_not_done(
    router: RunningRouter, storage: str, code: int, status: str
) -> None:
    state = msgspec.structs.replace(state_of("done", free=9), storage=storage)
    await router.start_worker(silence, worker_id="decode-0", cache_state=state)
    assert await reset(router) == (code, status, {"decode-0": status})
    (worker,) = (await router.http.post("/v1/cache/reset")).json()["workers"]
    assert worker["storage"] == storage
