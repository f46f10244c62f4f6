"""A decode worker that says anything: it may cost its own requests, and nobody else's.

A worker can go mad, and a key can be stolen. Whatever it says, each of its requests has one answer
in the form of all answers, nothing of it stays in the router, and what runs on others goes on.
"""

import asyncio
import json
from typing import Any

import msgspec
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from core.messages import AnyMessage, Failed, Generate, Output, OutputBatch, WorkerLoad
from tests.core.message_strategies import MESSAGE_TYPES, messages
from tests.router.conftest import MODEL, RunningRouter, StartRouter
from tests.router.model_folder import EOS
from tests.router.scripted_worker import ScriptedWorker, say

TEXT = "the quick brown fox jumps over the lazy dog"
NUM_CASES = 40
Words = list[tuple[AnyMessage, bool]]
"""What is said of a request, and whether it names the request and its attempt."""


def words() -> list[Words]:
    """Return what a mad worker says, case by case."""
    said = st.one_of(
        messages(Output).map(lambda output: OutputBatch((output,))),
        messages(Failed),
        st.sampled_from(MESSAGE_TYPES).flatmap(messages),
    )
    cases: list[Words] = []

    @settings(
        max_examples=NUM_CASES,
        deadline=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.lists(st.tuples(said, st.booleans()), max_size=6))
    def collect(case: Words) -> None:
        cases.append(case)

    collect()
    return cases


def of(generate: Generate, message: AnyMessage) -> AnyMessage:
    """Return ``message`` as one of ``generate``."""
    owner = {"request_id": generate.request_id, "attempt": generate.attempt}
    if isinstance(message, OutputBatch):
        outputs = tuple(msgspec.structs.replace(each, **owner) for each in message.outputs)
        return OutputBatch(outputs)
    if isinstance(message, Failed):
        return msgspec.structs.replace(message, **owner)
    return message


async def test_whatever_a_worker_says_each_request_has_one_answer(
    start_router: StartRouter,
) -> None:
    router = await start_router(max_attempts=2, request_timeout_s=2.0, admission_wait_s=2.0)
    cases = iter(words())

    async def mad(worker: ScriptedWorker, generate: Generate) -> None:
        for message, is_named in next(cases, ()):
            worker.send(of(generate, message) if is_named else message)
        worker.output(generate, (20,), finish="stop")

    worker = await router.start_worker(mad)
    for number in range(NUM_CASES):
        body = {"model": MODEL, "prompt": "a", "max_tokens": 8, "stream": number % 2 == 0}
        check(await router.http.post("/v1/completions", json=body | {"logprobs": number % 3}))
    await router.until_idle()

    # And the router serves others as ever
    await router.start_worker(say([*router.ids(TEXT), EOS]), worker_id="decode-1")
    worker.load = WorkerLoad(running=9)
    assert await answer_of_another(router) == TEXT


def check(answer: Any) -> None:
    """The answer is whole, and is a success or one error."""
    if answer.headers["content-type"] == "application/json":
        assert ("error" in answer.json()) == (answer.status_code != 200)
        return
    *events, last = [event.removeprefix("data: ") for event in answer.text.strip().split("\n\n")]
    assert not any("error" in json.loads(event) for event in events)
    assert last == "[DONE]" or "error" in json.loads(last)


async def answer_of_another(router: RunningRouter) -> str:
    """Return the text of the first answer that the good worker gives."""
    body = {"model": MODEL, "prompt": "a", "max_tokens": 100}
    async with asyncio.timeout(20):
        while True:
            answer = await router.http.post("/v1/completions", json=body)
            if answer.status_code == 200 and len(answer.json()["choices"][0]["text"]) > 20:
                return answer.json()["choices"][0]["text"]
