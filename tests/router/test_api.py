"""The official OpenAI client works unchanged, over real HTTP, against a scripted decode worker."""

import asyncio

import pytest

from core.messages import DesiredWorkers, Generate
from tests.router.conftest import MODEL, RunningRouter
from tests.router.model_folder import EOS
from tests.router.scripted_worker import ScriptedWorker, say

TEXT = "hello world, this is a \N{SNOWMAN} test \N{GRINNING FACE}"


@pytest.fixture
async def worker(router: RunningRouter) -> ScriptedWorker:
    """Says ``TEXT`` and then the end token."""
    return await router.start_worker(say([*router.ids(TEXT), EOS]))


async def test_chat_completion(router: RunningRouter, worker: ScriptedWorker) -> None:
    response = await router.openai.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "hi"}], seed=7, temperature=0
    )

    choice = response.choices[0]
    assert (choice.message.role, choice.message.content) == ("assistant", TEXT)
    assert choice.finish_reason == "stop"
    assert response.usage is not None
    assert response.usage.completion_tokens == len(router.ids(TEXT)) + 1
    (generate,) = worker.generates
    assert response.usage.prompt_tokens == len(generate.prompt_token_ids)
    assert generate.sampling.seed == 7
    assert generate.sampling.stop_token_ids == (EOS,)
    prompt = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert list(generate.prompt_token_ids) == router.ids(prompt)


@pytest.mark.usefixtures("worker")
async def test_chat_stream_with_usage(router: RunningRouter) -> None:
    stream = await router.openai.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "hi"}],
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = [chunk async for chunk in stream]

    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == TEXT
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == len(router.ids(TEXT)) + 1
    assert len({chunk.id for chunk in chunks}) == 1
    assert all("\N{REPLACEMENT CHARACTER}" not in chunk.model_dump_json() for chunk in chunks)


async def test_completion_of_texts_and_ids_with_n(
    router: RunningRouter, worker: ScriptedWorker
) -> None:
    response = await router.openai.completions.create(
        model=MODEL, prompt=["the fox", "hello"], n=2, max_tokens=4, seed=1, echo=True
    )

    cut = router.tokenizer.decode(router.ids(TEXT)[:4])
    assert [choice.index for choice in response.choices] == [0, 1, 2, 3]
    assert [c.text for c in response.choices] == [f"the fox{cut}"] * 2 + [f"hello{cut}"] * 2
    assert {choice.finish_reason for choice in response.choices} == {"length"}
    assert [g.sampling.seed for g in worker.generates] == [1, 2, 1, 2]

    ids = await router.openai.completions.create(
        model=MODEL, prompt=[[10, 11, 12]], max_tokens=4, stream=True
    )
    text = "".join([chunk.choices[0].text async for chunk in ids])
    assert text == cut
    assert worker.generates[-1].prompt_token_ids == (10, 11, 12)


@pytest.mark.usefixtures("worker")
async def test_streamed_choices_keep_their_indices(router: RunningRouter) -> None:
    stream = await router.openai.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "hi"}], n=3, stream=True
    )
    texts: dict[int, str] = {}
    reasons: dict[int, str] = {}
    async for chunk in stream:
        (choice,) = chunk.choices
        texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
        if choice.finish_reason:
            reasons[choice.index] = choice.finish_reason
    assert texts == dict.fromkeys(range(3), TEXT)
    assert reasons == dict.fromkeys(range(3), "stop")


async def test_stop_string_is_hidden_and_aborts_the_worker(router: RunningRouter) -> None:
    # Given a worker that never ends by itself
    async def endless(worker: ScriptedWorker, generate: Generate) -> None:
        for token_id in router.ids("one two STOP three"):
            worker.output(generate, (token_id,))

    worker = await router.start_worker(endless)

    # When a stop string appears, cut over several tokens
    stream = await router.openai.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "hi"}], stop=["STOP", "x"], stream=True
    )
    chunks = [chunk.choices[0] async for chunk in stream]

    # Then none of it was shown, and the worker was told
    assert "".join(choice.delta.content or "" for choice in chunks) == "one two "
    assert chunks[-1].finish_reason == "stop"
    await worker.wait_for(lambda: len(worker.aborts) == 1)


@pytest.mark.usefixtures("worker")
async def test_chat_logprobs_name_every_token(router: RunningRouter) -> None:
    response = await router.openai.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "hi"}], logprobs=True, top_logprobs=2
    )
    logprobs = response.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    data = b"".join(bytes(entry.bytes or []) for entry in logprobs.content)
    assert data.decode() == TEXT
    assert all(len(entry.top_logprobs) == 2 for entry in logprobs.content)
    assert logprobs.content[0].logprob == pytest.approx(-0.5)


@pytest.mark.usefixtures("worker")
async def test_completion_logprobs_offsets_point_into_the_text(router: RunningRouter) -> None:
    response = await router.openai.completions.create(
        model=MODEL, prompt="a", logprobs=1, max_tokens=5
    )
    choice = response.choices[0]
    assert choice.logprobs is not None
    for token, offset in zip(
        choice.logprobs.tokens or [], choice.logprobs.text_offset or [], strict=True
    ):
        assert choice.text[offset:].startswith(token)


async def test_models_health_ready_and_status(
    router: RunningRouter, worker: ScriptedWorker
) -> None:
    models = await router.openai.models.list()
    assert [model.id for model in models.data] == [MODEL]
    assert (await router.openai.models.retrieve(MODEL)).id == MODEL
    assert (await router.http.get("/health")).status_code == 200
    assert (await router.http.get("/ready")).json() == {
        "status": "ready",
        "prefill": 0,
        "decode": 1,
    }
    answer = (await router.http.get("/status")).json()
    (status,) = answer["workers"]
    assert (status["worker_id"], status["state"]) == (worker.worker_id, "ready")
    told = (answer["desired"], answer["desired_revisions"], answer["trouble"])
    assert told == (None, None, []), "this worker is no deployment's"


async def test_what_its_supervisor_told_a_worker_is_in_the_status(
    router: RunningRouter, worker: ScriptedWorker
) -> None:
    line = "decode-1 stays down: it died 4 times in a row: ValueError: \N{SNOWMAN}"
    word = DesiredWorkers(
        *(1, 0, 2), edition=1, prefill_revision="p", decode_revision="d", trouble=(line,)
    )
    worker.desired = word
    async with asyncio.timeout(20):
        while not (status := (await router.http.get("/status")).json())["desired"]:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    assert status["desired"] == {"prefill": 0, "decode": 2}
    assert status["desired_revisions"] == {"prefill": "p", "decode": "d"}
    assert status["trouble"] == [line]


async def test_what_its_supervisor_told_the_router_is_in_the_status_of_a_router_without_workers(
    router: RunningRouter,
) -> None:
    router.lifecycle.desired = DesiredWorkers(1, 1, 1, trouble=("decode-0 stays down: no room",))
    status = (await router.http.get("/status")).json()
    assert status["workers"] == []
    assert status["desired"] == {"prefill": 1, "decode": 1}
    assert status["trouble"] == ["decode-0 stays down: no room"]


async def test_ready_only_after_a_generation_has_passed(router: RunningRouter) -> None:
    # Given a worker that reports and connects, but does not generate
    worker = await router.start_worker(say([EOS]), answers_probes=False, wait=False)
    await router.until_state("decode-0", "starting")
    assert (await router.http.get("/ready")).status_code == 503

    # When it fails the probe, and answers the next one
    worker.answers_probes = True
    await worker.die()
    await router.until_state("decode-0", None)
    await router.start_worker(say([EOS]))

    # Then it is ready
    assert (await router.http.get("/ready")).status_code == 200


@pytest.mark.usefixtures("worker")
async def test_stats_only_for_who_asks(router: RunningRouter) -> None:
    body = {"model": MODEL, "prompt": "a", "max_tokens": 2}
    plain = (await router.http.post("/v1/completions", json=body)).json()
    assert "sluice" not in plain
    headers = {"x-sluice-stats": "1", "x-request-id": "my-id"}
    response = await router.http.post("/v1/completions", json=body, headers=headers)
    assert response.json()["sluice"]["path"] == "local"
    assert response.headers["x-request-id"] == "my-id"
    streamed = await router.http.post(
        "/v1/completions", json=body | {"stream": True}, headers=headers
    )
    assert '"sluice":{"path":"local"' in streamed.text.split("data: ")[-2]
    assert streamed.text.endswith("data: [DONE]\n\n")
