"""What clients see, and what workers are told, when something stops in the middle.

Failures elsewhere in the field: a lost worker that hangs its clients, a failed generation that is
answered 200, a retry that repeats or drops tokens, an abort that never reaches the engine.
"""

import asyncio
import json

import openai
import pytest

from core.messages import Generate
from tests.router.conftest import MODEL, WAIT_S, RunningRouter, StartRouter
from tests.router.model_folder import EOS
from tests.router.scripted_worker import ScriptedWorker, say, silence

TEXT = "the quick brown fox jumps over the lazy dog"
BODY = {"model": MODEL, "prompt": "a", "max_tokens": 100}


async def test_disconnect_aborts_a_stream_and_a_whole_answer(router: RunningRouter) -> None:
    async def one_token(worker: ScriptedWorker, generate: Generate) -> None:
        worker.output(generate, (20,))

    worker = await router.start_worker(one_token)

    # A client that leaves after the first event
    async with router.http.stream(
        "POST", "/v1/completions", json=BODY | {"stream": True}
    ) as answer:
        await anext(answer.aiter_bytes())
    await worker.wait_for(lambda: len(worker.aborts) == 1)

    # A client that gives up waiting
    asking = asyncio.create_task(router.http.post("/v1/completions", json=BODY))
    await worker.wait_for(lambda: len(worker.generates) == 2)
    asking.cancel()
    await worker.wait_for(lambda: len(worker.aborts) == 2)
    assert [abort.request_id for abort in worker.aborts] == [g.request_id for g in worker.generates]
    assert await router.metric('sluice_cancellations_total{cause="client",') == 2


@pytest.mark.parametrize("how", ["dies", "freezes", "restarts"])
async def test_h03_lost_decode_worker_is_replaced_without_lost_or_doubled_tokens(
    router: RunningRouter, how: str
) -> None:
    # Given a worker that gives five tokens and then nothing, and another that can go on
    ids = [*router.ids(TEXT), EOS]

    async def half(worker: ScriptedWorker, generate: Generate) -> None:
        for token_id in ids[:5]:
            worker.output(generate, (token_id,))

    first = await router.start_worker(half)
    stream = await router.openai.completions.create(
        model=MODEL, prompt="a", max_tokens=100, stream=True
    )
    text = (await anext(stream)).choices[0].text
    second = await router.start_worker(say(ids), worker_id="decode-1")

    # When the first is lost
    if how == "dies":
        await first.die()
    elif how == "freezes":
        first.frozen = True
    else:
        await router.start_worker(say(ids), wait=False)

    # Then the text goes on after what was sent, to its end
    text += "".join([chunk.choices[0].text async for chunk in stream])
    assert text == TEXT
    (again,) = [*second.generates, *(g for g in first.generates if g.attempt > 1)]
    assert again.attempt == 2
    assert list(again.output_token_ids) == ids[:5]
    assert await router.metric("sluice_retries_total") == 1


async def test_lost_last_worker_ends_the_request_with_a_clean_error(
    start_router: StartRouter,
) -> None:
    router = await start_router(admission_wait_s=0.3)

    async def one_token(worker: ScriptedWorker, generate: Generate) -> None:
        if generate.prompt_token_ids == (10,):
            worker.output(generate, (20,))

    # A whole answer gets a 503
    worker = await router.start_worker(one_token)
    asking = asyncio.create_task(router.http.post("/v1/completions", json=BODY))
    await worker.wait_for(lambda: bool(worker.generates))
    await worker.die()
    answer = await asking
    assert answer.status_code == 503
    assert answer.headers["retry-after"]
    assert answer.json()["error"]["code"] == "overloaded"

    # A stream that has begun ends with an error event and no [DONE]
    worker = await router.start_worker(one_token)
    body = BODY | {"prompt": [10], "stream": True}
    async with router.http.stream("POST", "/v1/completions", json=body) as answer:
        chunks = answer.aiter_text()
        text = await anext(chunks)
        await worker.die()
        text += "".join([chunk async for chunk in chunks])
    events = text.strip().split("\n\n")
    assert answer.status_code == 200
    assert json.loads(events[-1].removeprefix("data: "))["error"]["code"] == "overloaded"
    assert "[DONE]" not in text
    assert await router.metric('sluice_requests_total{code="503"') == 2


async def test_stream_error_is_raised_by_the_openai_client(router: RunningRouter) -> None:
    async def fails_late(worker: ScriptedWorker, generate: Generate) -> None:
        worker.output(generate, (20,))
        worker.fail(generate, "internal")

    await router.start_worker(fails_late)
    stream = await router.openai.completions.create(model=MODEL, prompt="a", stream=True)
    with pytest.raises(openai.APIError, match="scripted internal failure"):
        _ = [chunk async for chunk in stream]


@pytest.mark.parametrize("answer", ["streamed", "whole"])
async def test_one_choice_that_fails_ends_the_others_and_leaves_their_places(
    router: RunningRouter, answer: str
) -> None:
    # Given a request for three choices, all of them under way
    under_way = asyncio.Barrier(3)

    async def fails_one(worker: ScriptedWorker, generate: Generate) -> None:
        worker.output(generate, (20,))
        await under_way.wait()
        if generate.request_id.endswith("-0"):
            worker.fail(generate, "internal")

    worker = await router.start_worker(fails_one)
    # When one fails
    body = BODY | {"n": 3, "stream": answer == "streamed"}
    text = (await router.http.post("/v1/completions", json=body)).text

    # Then the client is told once, what runs on is ended, and the router has nothing left of it
    assert text.count('"error"') == text.count("scripted internal failure") == 1
    await worker.wait_for(lambda: len(worker.aborts) == 2)
    await router.until_idle()
    assert await router.metric('sluice_requests_total{code="500",') == 1
    assert await router.metric('sluice_requests_total{code="499",') == 0


@pytest.mark.parametrize(
    ("kind", "status", "num_attempts"),
    [("request", 400, 1), ("internal", 500, 1), ("capacity", 503, 3), ("transfer", 503, 3)],
)
async def test_failures_are_retried_only_where_another_attempt_can_help(
    router: RunningRouter, kind: str, status: int, num_attempts: int
) -> None:
    async def fails(worker: ScriptedWorker, generate: Generate) -> None:
        worker.fail(generate, kind)

    worker = await router.start_worker(fails)
    answer = await router.http.post("/v1/completions", json=BODY)

    assert answer.status_code == status
    assert f"scripted {kind} failure" in answer.json()["error"]["message"]
    assert [generate.attempt for generate in worker.generates] == list(range(1, num_attempts + 1))


async def test_failed_prefill_worker_is_avoided_by_the_retry(router: RunningRouter) -> None:
    ids = [*router.ids(TEXT), EOS]

    async def fails_with_first_peer(worker: ScriptedWorker, generate: Generate) -> None:
        assert generate.prefill is not None
        if generate.attempt == 1:
            worker.fail(generate, "transfer", peer=generate.prefill.worker_id)
        else:
            await say(ids)(worker, generate)

    for index in range(2):
        await router.start_worker(silence, worker_id=f"prefill-{index}", role="prefill")
    worker = await router.start_worker(fails_with_first_peer)

    body = BODY | {"prompt": [10] * 100}
    answer = await router.http.post("/v1/completions", json=body)

    assert answer.json()["choices"][0]["text"] == TEXT
    peers = [generate.prefill.worker_id for generate in worker.generates if generate.prefill]
    assert sorted(peers) == ["prefill-0", "prefill-1"]


async def test_h01_messages_of_a_stale_attempt_are_dropped_and_counted(
    router: RunningRouter,
) -> None:
    # Given an attempt that fails, and goes on talking after its successor has begun
    ids = [*router.ids(TEXT), EOS]

    async def confused(worker: ScriptedWorker, generate: Generate) -> None:
        if generate.attempt == 1:
            worker.fail(generate, "capacity")
            return
        for token_id in ids:
            worker.output(generate, (99, 98), attempt=1)
            worker.output(generate, (token_id,), finish="stop" if token_id == EOS else None)
        worker.output(generate, (99,), finish="stop")
        worker.fail(generate, "internal")

    await router.start_worker(confused)
    answer = await router.http.post("/v1/completions", json=BODY)

    # Then the text has nothing of it
    assert answer.json()["choices"][0]["text"] == TEXT
    assert await router.metric("sluice_stale_messages_total") == len(ids) + 2


async def test_request_timeout_aborts_and_answers_504(start_router: StartRouter) -> None:
    router = await start_router(request_timeout_s=0.3)
    worker = await router.start_worker(silence)
    answer = await router.http.post("/v1/completions", json=BODY)
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "request_timeout")
    await worker.wait_for(lambda: len(worker.aborts) == 1)


async def test_timeout_of_a_stream_is_its_last_event(start_router: StartRouter) -> None:
    router = await start_router(request_timeout_s=0.3)

    async def one_token(worker: ScriptedWorker, generate: Generate) -> None:
        worker.output(generate, (20,))

    worker = await router.start_worker(one_token)
    answer = await router.http.post("/v1/completions", json=BODY | {"stream": True})
    (*_, last) = answer.text.strip().split("\n\n")
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "request_timeout"
    await worker.wait_for(lambda: len(worker.aborts) == 1)
    await router.until_idle()
    assert await router.metric('sluice_requests_total{code="504",') == 1


async def test_a_client_that_leaves_while_no_worker_is_there_frees_its_place(
    start_router: StartRouter,
) -> None:
    router = await start_router(admission_wait_s=10, max_pending_requests=1)
    asking = asyncio.create_task(router.http.post("/v1/completions", json=BODY))
    async with asyncio.timeout(WAIT_S):
        while not await router.metric('sluice_stage_requests{stage="route"}'):  # noqa: ASYNC110 - from outside
            await asyncio.sleep(0.01)
    asking.cancel()
    await router.until_idle()
    worker = await router.start_worker(say([20, EOS]))
    assert (await router.http.post("/v1/completions", json=BODY)).status_code == 200
    assert len(worker.generates) == 1


async def test_no_worker_is_a_bounded_503(start_router: StartRouter) -> None:
    router = await start_router(admission_wait_s=0.2)
    answer = await router.http.post("/v1/completions", json=BODY)
    assert answer.status_code == 503
    assert "no decode worker" in answer.json()["error"]["message"]


async def test_waiting_request_goes_on_when_a_worker_appears(start_router: StartRouter) -> None:
    router = await start_router(admission_wait_s=10)
    asking = asyncio.create_task(router.http.post("/v1/completions", json=BODY))
    await router.start_worker(say([*router.ids(TEXT), EOS]))
    assert (await asking).json()["choices"][0]["text"] == TEXT


async def test_more_than_the_pending_limit_is_a_503_and_frees_its_place(
    start_router: StartRouter,
) -> None:
    router = await start_router(max_pending_requests=1)
    release = asyncio.Event()

    async def waits(worker: ScriptedWorker, generate: Generate) -> None:
        await release.wait()
        await say([20, EOS])(worker, generate)

    worker = await router.start_worker(waits)
    first = asyncio.create_task(router.http.post("/v1/completions", json=BODY))
    await worker.wait_for(lambda: bool(worker.generates))

    second = await router.http.post("/v1/completions", json=BODY)
    assert (second.status_code, second.json()["error"]["code"]) == (503, "overloaded")
    assert second.headers["retry-after"] == "1"
    release.set()
    assert (await first).status_code == 200
    assert (await router.http.post("/v1/completions", json=BODY)).status_code == 200


async def test_a_full_router_tokenizes_no_prompt_that_it_will_refuse(
    start_router: StartRouter,
) -> None:
    router = await start_router(max_pending_requests=1)
    worker = await router.start_worker(silence)
    first = asyncio.create_task(router.http.post("/v1/completions", json=BODY))
    await worker.wait_for(lambda: bool(worker.generates))

    tokenized = 'sluice_stage_duration_seconds_count{stage="tokenize"}'
    assert await router.metric(tokenized) == 1
    answer = await router.http.post("/v1/completions", json=BODY | {"prompt": "the fox " * 50})
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "overloaded")
    assert await router.metric(tokenized) == 1
    assert await router.metric('sluice_rejections_total{reason="queue_full"}') == 1
    first.cancel()


async def test_stop_ends_open_streams_with_an_error(router: RunningRouter) -> None:
    async def one_token(worker: ScriptedWorker, generate: Generate) -> None:
        worker.output(generate, (20,))

    await router.start_worker(one_token)
    async with router.http.stream(
        "POST", "/v1/completions", json=BODY | {"stream": True}
    ) as answer:
        chunks = answer.aiter_text()
        await anext(chunks)
        router.lifecycle.stop.set()
        rest = "".join([chunk async for chunk in chunks])
    assert '"code":"shutting_down"' in rest
    async with asyncio.timeout(WAIT_S):
        await router.serving


async def test_worker_with_changed_incarnation_gets_no_old_request(router: RunningRouter) -> None:
    worker = await router.start_worker(say([20, EOS]))
    await worker.die()
    await router.until_state("decode-0", None)
    again = await router.start_worker(say([21, EOS]))
    answer = await router.http.post("/v1/completions", json=BODY)
    assert answer.status_code == 200
    assert len(again.generates) == 1
    assert worker.generates == []


async def test_impossible_token_ids_end_the_request_and_not_the_router(
    start_router: StartRouter,
) -> None:
    router = await start_router(admission_wait_s=30.0)

    async def insane(worker: ScriptedWorker, generate: Generate) -> None:
        worker.output(generate, (20, -1) if generate.prompt_token_ids == (10,) else (2**40,))

    await router.start_worker(insane)
    for prompt in ([10], [11]):
        answer = await router.http.post("/v1/completions", json=BODY | {"prompt": prompt})
        assert answer.status_code == 503
        assert "decode-0 was lost" in answer.json()["error"]["message"]
