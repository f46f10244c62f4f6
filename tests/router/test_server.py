"""The router as a process: what it loads, what stops its start, what it counts, and load."""

import asyncio
import random
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from core.channel import DeploymentKeys
from core.config import SluiceConfig
from core.errors import ConfigError
from core.lifecycle import Lifecycle
from core.messages import Generate
from router.server import RouterContext, run_router
from router.tokenizer import Tokenizer
from tests.router.conftest import MODEL, StartRouter
from tests.router.model_folder import EOS, make_model_folder
from tests.router.scripted_worker import ScriptedWorker, say, silence

BODY = {"model": MODEL, "prompt": "a", "max_tokens": 100}


def _context(path: Path, *, port: int = 0) -> RouterContext:
    config = SluiceConfig.parse({"router": {"port": port}}, source="test")
    return RouterContext(config, path, MODEL, DeploymentKeys.generate().of("router"), "127.0.0.1")


def test_router_loads_no_torch() -> None:
    code = "import sys, router.server; print(*{'torch', 'transformers', 'ray'} & set(sys.modules))"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert loaded.stdout.strip() == ""


async def test_busy_port_stops_the_start_with_one_line(model_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"cannot listen on 127\.0\.0\.1:{port}") as caught:
            await run_router(_context(model_path, port=port), Lifecycle())
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("file", "content", "problem"),
    [
        ("tokenizer.json", None, "no tokenizer.json"),
        ("tokenizer.json", "{}", "bad tokenizer.json"),
        ("config.json", None, "no config.json"),
        ("config.json", "[", "cannot be read as JSON"),
        ("config.json", '{"vocab_size": 5}', "max_position_embeddings"),
        ("chat_template.jinja", "{% if %}", "chat template"),
    ],
)
async def test_bad_model_folder_stops_the_start_with_one_line(
    tmp_path: Path, file: str, content: str | None, problem: str
) -> None:
    make_model_folder(tmp_path)
    if content is None:
        (tmp_path / file).unlink()
    else:
        (tmp_path / file).write_text(content)
    with pytest.raises(ConfigError, match=problem) as caught:
        await run_router(_context(tmp_path), Lifecycle())
    assert "\n" not in str(caught.value)


async def test_every_metric_counts_something_real(start_router: StartRouter) -> None:
    # Given a router that sees successes, retries, rejections, cancellations, stale messages and
    # a stranger at its control port
    router = await start_router(max_attempts=2, max_pending_requests=2)
    host, port = router.address.control.removeprefix("tcp://").split(":")
    _, writer = await asyncio.open_connection(host, int(port))
    writer.close()

    async def script(worker: ScriptedWorker, generate: Generate) -> None:
        first = generate.prompt_token_ids[0]
        if first == 10:
            worker.fail(generate, "capacity")
            worker.fail(generate, "capacity")
        elif first != 11:
            await say([20, 21, 22, EOS])(worker, generate)

    worker = await router.start_worker(script)
    post = router.http.post
    await post("/v1/completions", json=BODY)
    await post("/v1/completions", json=BODY | {"prompt": [10]})
    await post("/v1/completions", json=BODY | {"n": 3})
    waiting = [
        asyncio.create_task(post("/v1/completions", json=BODY | {"prompt": [11]})) for _ in range(2)
    ]
    await worker.wait_for(lambda: len(worker.generates) == 5)
    assert (await post("/v1/completions", json=BODY)).status_code == 503
    gauge = await router.metric('sluice_stage_requests{stage="generate"}')
    for task in waiting:
        task.cancel()
    await worker.wait_for(lambda: len(worker.aborts) == 2)

    # Then each of its metrics has a sample that is not zero
    assert gauge == 2
    text = (await router.http.get("/metrics")).text
    silent = [
        family.name
        for family in text_string_to_metric_families(text)
        if not any(sample.value for sample in family.samples)
    ]
    assert silent == [
        "sluice_stage_requests",
        "sluice_worker_restarts",
        "sluice_workers_desired",  # these workers are not told how many are wanted
    ]
    assert await router.metric('sluice_stage_requests{stage="generate"}') == 0


async def test_64_streams_with_random_disconnects_leave_nothing_running(
    start_router: StartRouter,
) -> None:
    # Given two workers that give one token every millisecond, and are not lost by a busy machine
    router = await start_router(worker_silence_s=20.0)
    ids = [20 + index for index in range(60)] + [EOS]
    finished: set[str] = set()

    async def steady(worker: ScriptedWorker, generate: Generate) -> None:
        for token_id in ids[len(generate.output_token_ids) :]:
            if any(abort.request_id == generate.request_id for abort in worker.aborts):
                return
            if token_id == EOS:  # known before the client is: nothing tells of it afterwards
                finished.add(generate.request_id)
            worker.output(generate, (token_id,), finish="stop" if token_id == EOS else None)
            await asyncio.sleep(0.001)

    workers = [await router.start_worker(steady, worker_id=f"decode-{index}") for index in range(2)]
    chance = random.Random(5)

    async def stream(leaves_after: int | None) -> str:
        text = ""
        body = BODY | {"stream": True}
        async with router.http.stream("POST", "/v1/completions", json=body) as answer:
            async for line in answer.aiter_lines():
                text += line
                if leaves_after is not None and text.count("data: ") > leaves_after:
                    return ""
        return text

    # When a third of 64 clients leave in the middle
    leaving = [chance.randrange(40) if index % 3 == 0 else None for index in range(64)]
    texts = await asyncio.gather(*map(stream, leaving))

    # Then the others have all their tokens, and every request was finished or aborted
    stayed = [text for text in texts if text]
    assert len(stayed) == leaving.count(None)
    assert all(text.endswith("data: [DONE]") for text in stayed)
    assert {text.count('"text":') for text in stayed} == {len(ids)}
    for worker in workers:
        asked = {generate.request_id for generate in worker.generates}
        await worker.wait_for(
            lambda worker=worker, asked=asked: (
                asked <= finished | {abort.request_id for abort in worker.aborts}
            )
        )
    counts = [len(worker.generates) for worker in workers]
    assert sum(counts) == 64
    assert min(counts) >= 28
    await router.until_idle()


async def test_h08_abort_storm_harms_no_other_request(start_router: StartRouter) -> None:
    router = await start_router()

    async def script(worker: ScriptedWorker, generate: Generate) -> None:
        if generate.prompt_token_ids == (10,):
            await say([20, EOS])(worker, generate)
        else:
            await silence(worker, generate)

    worker = await router.start_worker(script)
    storm = [
        asyncio.create_task(router.openai.completions.create(model=MODEL, prompt=[11], n=10))
        for _ in range(50)
    ]
    await worker.wait_for(lambda: len(worker.generates) == 500)
    for task in storm:
        task.cancel()
    answers = await asyncio.gather(
        *(router.http.post("/v1/completions", json=BODY | {"prompt": [10]}) for _ in range(20))
    )
    assert {answer.status_code for answer in answers} == {200}
    await worker.wait_for(lambda: len(worker.aborts) == 500)
    assert len({abort.request_id for abort in worker.aborts}) == 500


async def test_event_loop_goes_on_while_a_long_prompt_is_tokenized(tokenizer: Tokenizer) -> None:
    """Held GIL: every stream of the router would stop for as long as a megabyte of text takes."""
    text = "the quick brown fox " * 20_000
    encoding = asyncio.create_task(
        asyncio.to_thread(tokenizer.encode, text, add_special_tokens=False)
    )
    num_turns = 0
    while not encoding.done():
        await asyncio.sleep(0)
        num_turns += 1
    assert tokenizer.decode(await encoding) == text
    assert num_turns > 10
