"""Whoever asks how a request went sees every process's part of it on one clock.

The failures guarded against: a read that seems to begin before its ticket because two machines'
clocks differ, and an operator who waits for a worker that is gone.
"""

import time
from typing import Any

import pytest

from core.ids import Incarnation, RequestId, WorkerId
from core.messages import Generate, Heartbeat, TraceReport
from core.trace import Recorder, TraceEvent
from router import trace_control
from router.questions import Life, Reply
from router.trace_control import RequestNames, aligned
from tests.router.conftest import RunningRouter, StartRouter
from tests.router.scripted_worker import Script, ScriptedWorker, say

AHEAD_S = 5000.0
"""Of the worker's clock before the router's: another machine, started another day."""


def recording(recorder: Recorder, token_ids: list[int]) -> Script:
    """Return a script that records what it does, and says ``token_ids``."""

    async def script(worker: ScriptedWorker, generate: Generate) -> None:
        owner = (generate.request_id, generate.attempt)
        recorder.record(owner, "received", tokens=len(generate.prompt_token_ids))
        await say(token_ids)(worker, generate)
        recorder.record(owner, "finished", tokens=len(token_ids), reason="stop")

    return script


def elsewhere() -> Recorder:
    return Recorder(lambda: time.monotonic() + AHEAD_S)


async def complete(router: RunningRouter, **body: Any) -> tuple[str, str]:
    """Return the names of one completion: the response's id and its ``x-request-id``."""
    response = await router.http.post(
        "/v1/completions", json={"model": "test-model", "prompt": "hello", **body}
    )
    assert response.status_code == 200, response.text
    return response.json()["id"], response.headers["x-request-id"]


async def trace(router: RunningRouter, name: str) -> dict[str, Any]:
    response = await router.http.get(f"/v1/trace/{name}")
    assert response.status_code == 200, response.text
    return response.json()


def events(process: dict[str, Any]) -> list[str]:
    return [entry["event"] for entry in process["events"]]


async def test_a_trace_puts_router_and_worker_on_one_clock(router: RunningRouter) -> None:
    recorder = elsewhere()
    await router.start_worker(recording(recorder, [5, 6, 7]), recorder=recorder)
    response_id, _ = await complete(router)

    found = await trace(router, response_id)

    own, decode = found["processes"]
    assert events(own) == ["arrived", "tokenized", "dispatched", "first_token", "finished"]
    assert (decode["name"], decode["role"], decode["status"]) == ("decode-0", "decode", "ok")
    assert events(decode) == ["received", "finished"]
    at = {entry["event"]: entry["at_s"] for entry in own["events"]}
    slack_s = decode["uncertainty_s"]
    assert at["arrived"] == 0.0
    assert slack_s > 0
    received, finished = (entry["at_s"] for entry in decode["events"])
    assert at["dispatched"] - slack_s <= received <= at["first_token"] + slack_s
    assert received <= finished


async def test_a_request_is_found_by_each_of_its_names(router: RunningRouter) -> None:
    await router.start_worker(say([5, 6]), recorder=elsewhere())
    response_id, x_request_id = await complete(router, n=2)
    found = [
        (await trace(router, name))["request_id"]
        for name in (response_id, x_request_id, f"{response_id}-0", f"{response_id}-1")
    ]
    assert found == [f"{response_id}-0"] * 3 + [f"{response_id}-1"]


async def test_each_sequence_of_a_request_tells_its_sisters(router: RunningRouter) -> None:
    await router.start_worker(say([5, 6]), recorder=elsewhere())
    alone, _ = await complete(router)
    response_id, x_request_id = await complete(router, n=3)
    sequences = [f"{response_id}-{index}" for index in range(3)]
    for name in (response_id, x_request_id, *sequences):
        assert (await trace(router, name))["choices"] == sequences
    assert (await trace(router, f"{alone}-0"))["choices"] == [f"{alone}-0"]


async def test_an_unknown_request_is_404_and_names_how_many_are_kept(router: RunningRouter) -> None:
    response = await router.http.get("/v1/trace/cmpl-nothing")
    assert response.status_code == 404
    assert "512" in response.json()["error"]["message"]
    assert await router.metric('sluice_requests_total{code="404",endpoint="/v1/trace"') == 1


async def test_a_worker_that_does_not_answer_is_told_as_unreachable(
    start_router: StartRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace_control, "ANSWER_TIMEOUT_S", 0.3)
    router = await start_router()
    await router.start_worker(say([5]), recorder=None)
    response_id, _ = await complete(router)
    own, decode = (await trace(router, response_id))["processes"]
    assert (own["status"], decode["status"], decode["events"]) == ("ok", "unreachable", [])


async def test_a_worker_that_was_not_chosen_is_not_asked(router: RunningRouter) -> None:
    await router.start_worker(say([5]), recorder=elsewhere())
    await router.start_worker(say([5]), worker_id="prefill-0", role="prefill", recorder=None)
    response_id, _ = await complete(router)
    found = await trace(router, response_id)
    assert [process["name"] for process in found["processes"]] == ["router", "decode-0"]


async def test_a_failed_attempt_and_its_reason_are_in_the_trace(router: RunningRouter) -> None:
    async def fail_first(worker: ScriptedWorker, generate: Generate) -> None:
        if generate.attempt == 1:
            worker.fail(generate, "transfer")
        else:
            await say([5, 6])(worker, generate)

    await router.start_worker(fail_first, recorder=elsewhere())
    response_id, _ = await complete(router)
    own = (await trace(router, response_id))["processes"][0]
    told = [(entry["event"], entry["attempt"]) for entry in own["events"]]
    assert told[2:6] == [
        ("dispatched", 1),
        ("attempt_failed", 1),
        ("dispatched", 2),
        ("first_token", 2),
    ]
    assert own["events"][3]["values"] == {
        "kind": "transfer",
        "reason": "scripted transfer failure",
    }


def reply(*, asked_at: float, answered_at: float, now_s: float, at_s: float) -> Reply[TraceReport]:
    worker, life = WorkerId("decode-0"), Incarnation("life-1")
    heartbeat = Heartbeat(worker, "decode", life, "tcp://x", "m", 1, None)  # type: ignore[arg-type]
    event = TraceEvent(at_s, "received", 1, {})  # type: ignore[arg-type]
    report = TraceReport(1, worker, "decode", life, now_s, (event,))
    return Reply(Life(b"client", heartbeat, asked_at), report, asked_at, answered_at)


@pytest.mark.parametrize("answered_after_s", [0.0, 0.001, 0.004])
def test_the_true_time_is_within_the_stated_uncertainty(answered_after_s: float) -> None:
    """Whenever in the round trip the worker read its clock."""
    # Given a round trip of 4 ms from 10.000, and an entry of 9.5 by the router's clock
    found = aligned(
        reply(
            asked_at=10.0,
            answered_at=10.004,
            now_s=10.0 + answered_after_s + AHEAD_S,
            at_s=9.5 + AHEAD_S,
        )
    )
    assert found.uncertainty_s == pytest.approx(0.002)
    assert abs(found.events[0].at_s - 9.5) <= found.uncertainty_s + 1e-9


def test_names_are_bounded_and_the_newest_meaning_counts() -> None:
    names = RequestNames(2)
    for index in range(3):
        names.add([f"name-{index}"], (RequestId(f"request-{index}"),))
    names.add(["name-1"], (RequestId("newer"),))
    assert names.requests("name-1") == ("newer",)
    assert names.requests("name-2") == ("request-2",)
    assert names.requests("name-0") == ("name-0",)
