"""Workers and routers that drain: nobody's client notices."""

import asyncio

import httpx

from core.messages import Generate
from tests.router.conftest import MODEL, RunningRouter, StartRouter
from tests.router.scripted_worker import ScriptedWorker, say


async def refuse(worker: ScriptedWorker, generate: Generate) -> None:
    """Be draining, which the router has not heard yet."""
    worker.fail(generate, "draining")


async def ask(router: RunningRouter) -> httpx.Response:
    body = {"model": MODEL, "prompt": "hello", "max_tokens": 4}
    return await router.http.post("/v1/completions", json=body)


async def test_more_draining_workers_than_attempts_are_no_failed_request(
    start_router: StartRouter,
) -> None:
    router = await start_router(max_attempts=1)
    draining = [
        await router.start_worker(refuse, worker_id=f"decode-{index}", heartbeat_interval_s=0.9)
        for index in range(3)
    ]
    await router.start_worker(say([20, 21]), worker_id="decode-3")
    answer = await ask(router)
    assert answer.status_code == 200, answer.text
    assert sum(len(worker.generates) for worker in draining) == 3
    answer = await ask(router)  # their heartbeats say "ready" yet, or again
    assert answer.status_code == 200, answer.text


async def test_a_refusal_takes_a_worker_out_before_its_next_heartbeat(
    start_router: StartRouter,
) -> None:
    router = await start_router(worker_silence_s=30.0)
    worker = await router.start_worker(refuse, worker_id="decode-0", heartbeat_interval_s=20.0)
    await router.start_worker(say([20, 21]), worker_id="decode-1", heartbeat_interval_s=20.0)
    for _ in range(3):
        assert (await ask(router)).status_code == 200
    assert len(worker.generates) == 1
    await router.until_state("decode-0", "draining")


async def test_a_draining_router_finishes_what_is_pending_refuses_the_rest_and_ends(
    start_router: StartRouter,
) -> None:
    router = await start_router()
    go_on = asyncio.Event()

    async def wait(worker: ScriptedWorker, generate: Generate) -> None:
        await go_on.wait()
        await say([20, 21])(worker, generate)

    worker = await router.start_worker(wait)
    pending = asyncio.create_task(ask(router))
    await worker.wait_for(lambda: len(worker.generates) == 1)
    assert (await router.http.get("/readyz")).status_code == 200
    router.lifecycle.drain.set()
    async with asyncio.timeout(5):
        while (await router.http.get("/readyz")).status_code != 503:  # noqa: ASYNC110 - from outside
            await asyncio.sleep(0.01)
    assert (await router.http.get("/livez")).status_code == 200
    refused = await ask(router)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
    go_on.set()
    assert (await pending).status_code == 200
    await asyncio.wait_for(router.serving, 10)
