"""A retry after tokens were sent is none that the client could tell by its answer.

Failures elsewhere in the field: a retry that begins again with the seed, so that the answer repeats
itself or turns; penalties and counts that forget what an earlier attempt gave; a limit that is
counted anew.
"""

import json
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from tests.integration.models import VOCAB_SIZE, tiny_model
from tests.integration.requests import prompt_of
from tests.integration.stack import Stack

pytestmark = [pytest.mark.ucx, pytest.mark.timeout(400)]

NUM_TOKENS = 300
MAX_TRIES = 8
ASKED: dict[str, dict[str, Any]] = {
    "sampled": {"seed": 7, "temperature": 1.0, "top_p": 0.95},
    "with penalties": {
        "seed": 3,
        "temperature": 0.8,
        "presence_penalty": 1.5,
        "frequency_penalty": 0.5,
        "repetition_penalty": 1.3,
    },
    "two choices": {"seed": 11, "temperature": 1.0, "n": 2},
    "likeliest with logprobs": {"temperature": 0, "logprobs": 3},
}


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with Stack.open(
        tiny_model("llama", tmp_path_factory.mktemp("models")),
        model={"dtype": "float32"},
        deploy={"prefill": 1, "decode": 2},
        cache={"memory_gib": 0.05},
        router={"local_prefill_max_tokens": 16, "worker_silence_s": 10.0},
    ) as stack:
        yield stack


@dataclass
class Answer:
    """What a stream has given, by choice."""

    token_ids: dict[int, list[int]] = field(default_factory=dict)
    logprobs: dict[int, list[float]] = field(default_factory=dict, compare=False)
    """Of each token the likeliest; about: a sum differs with the order of summing."""
    reasons: dict[int, list[str]] = field(default_factory=dict)
    usage: dict[str, Any] = field(default_factory=dict)
    workers: list[str] = field(default_factory=list, compare=False)
    """Of the attempts of its first choice."""

    def take(self, chunk: dict[str, Any]) -> None:
        assert "error" not in chunk, chunk
        if chunk.get("usage"):
            self.usage = {k: v for k, v in chunk["usage"].items() if k.endswith("_tokens")}
        for choice in chunk["choices"]:
            index = choice["index"]
            self.token_ids.setdefault(index, []).extend(choice["token_ids"])
            if choice["finish_reason"] is not None:
                self.reasons.setdefault(index, []).append(choice["finish_reason"])
            if choice["logprobs"] is not None:
                told = choice["logprobs"]["token_logprobs"]
                self.logprobs.setdefault(index, []).extend(told)


def ask(stack: Stack, fields: dict[str, Any], *, kill_after: int | None = None) -> Answer:
    """Return the streamed answer; ``kill_after`` so many tokens its decode worker is killed."""
    body = {
        "model": "model",
        "prompt": prompt_of(200, VOCAB_SIZE, seed=5),
        "max_tokens": NUM_TOKENS,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
        **fields,
    }
    answer = Answer()
    with httpx.stream("POST", f"{stack.url}/v1/completions", json=body, timeout=120) as response:
        assert response.status_code == 200, response.read()
        name = response.headers["x-request-id"]
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            answer.take(json.loads(line.removeprefix("data: ")))
            if kill_after is not None and len(answer.token_ids.get(0, ())) >= kill_after:
                kill_after = None
                stack.kill(workers_of(stack, name)[-1], signal_number=signal.SIGKILL)
    answer.workers = workers_of(stack, name)
    return answer


def workers_of(stack: Stack, name: str) -> list[str]:
    """Return the decode worker of each attempt."""
    _, body = stack.get(f"/v1/trace/{name}")
    events = json.loads(body)["processes"][0]["events"]
    return [e["values"]["decode"] for e in events if e["event"] == "dispatched"]


@pytest.fixture
def killed(stack: Stack) -> Iterator[None]:
    """Have whatever was killed started again."""
    yield
    start_again(stack)


def start_again(stack: Stack) -> None:
    for name, process in list(stack.processes.items()):
        if process.exitcode is not None:
            stack.start(name)
    stack.wait_ready()


@pytest.mark.usefixtures("killed")
@pytest.mark.parametrize("name", ASKED)
def test_h03_an_answer_whose_worker_was_killed_is_the_one_it_would_have_been(
    stack: Stack, name: str
) -> None:
    fields = ASKED[name]
    expected = ask(stack, fields)
    retried = ask_of_one_that_is_killed(stack, fields)
    assert all(len(ids) == NUM_TOKENS for ids in retried.token_ids.values())
    assert retried == expected
    assert retried.logprobs.keys() == expected.logprobs.keys()
    for index, logprobs in expected.logprobs.items():
        assert retried.logprobs[index] == pytest.approx(logprobs, abs=0.01)
    assert retried.reasons == {index: ["length"] for index in range(fields.get("n", 1))}


def ask_of_one_that_is_killed(stack: Stack, fields: dict[str, Any]) -> Answer:
    """Return an answer that two workers gave: whoever is killed may have said all before."""
    for _ in range(MAX_TRIES):
        answer = ask(stack, fields, kill_after=20)
        if len(set(answer.workers)) == 2:
            return answer
        start_again(stack)
    pytest.fail("no answer is retried")
