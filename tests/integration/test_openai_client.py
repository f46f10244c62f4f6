"""Programs written for OpenAI's client work unchanged against a whole deployment."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import OpenAI

from tests.integration.requests import prompt_of
from tests.integration.stack import Stack

pytestmark = [pytest.mark.ucx, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def stack(default_model: Path) -> Iterator[Stack]:
    with Stack.open(default_model, model={"dtype": "float32"}, router={"max_body_mib": 1}) as stack:
        yield stack


@pytest.fixture(scope="module")
def client(stack: Stack) -> OpenAI:
    return OpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0, timeout=120)


QUESTION = [{"role": "user", "content": "Name the capital of France in one word."}]


def test_models_are_listed(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["model"]


def test_chat_answers(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        model="model", messages=QUESTION, temperature=0, max_tokens=24
    )
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_streamed_chat_is_the_whole_answer_in_pieces(client: OpenAI) -> None:
    options: dict[str, Any] = {
        "model": "model",
        "messages": QUESTION,
        "temperature": 0,
        "max_tokens": 24,
    }
    whole = client.chat.completions.create(**options)
    stream = client.chat.completions.create(
        **options, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage == whole.usage or chunks[-1].usage is not None
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason


def test_seed_repeats_and_n_differs(client: OpenAI) -> None:
    def sample(seed: int, n: int) -> list[str]:
        answer = client.completions.create(
            model="model", prompt="Once upon a time", seed=seed, n=n, max_tokens=12, temperature=1
        )
        return [choice.text for choice in answer.choices]

    first = sample(7, 3)
    assert sample(7, 3) == first
    assert len(set(first)) == 3
    assert sample(8, 3) != first


def test_stop_string_ends_the_text_before_it(client: OpenAI) -> None:
    options: dict[str, Any] = {"model": "model", "prompt": "1, 2, 3, 4, 5,", "temperature": 0}
    whole = client.completions.create(**options, max_tokens=24).choices[0].text
    stop = whole[10:13]
    cut = client.completions.create(**options, max_tokens=24, stop=[stop]).choices[0]
    assert cut.text == whole[: whole.index(stop)]
    assert cut.finish_reason == "stop"


def test_logprobs_hold_the_chosen_and_the_likeliest(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        model="model", messages=QUESTION, temperature=0, max_tokens=4, logprobs=True, top_logprobs=3
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    for entry in logprobs.content:
        assert len(entry.top_logprobs) == 3
        assert entry.top_logprobs[0].logprob == entry.logprob <= 0


def test_logprobs_of_the_first_token_come_from_prefill(client: OpenAI) -> None:
    prompt = prompt_of(200, 49_000, seed=5)
    options: dict[str, Any] = {"model": "model", "prompt": prompt, "temperature": 0, "logprobs": 2}
    headers = {"x-sluice-stats": "1"}
    far = client.completions.create(**options, max_tokens=3, extra_headers=headers)
    near = client.completions.create(**options, max_tokens=3, extra_headers=headers)
    assert far.model_extra is not None
    assert near.model_extra is not None
    assert far.model_extra["sluice"]["path"] == "disaggregated"
    assert near.model_extra["sluice"]["path"] == "local"  # the prefix is cached on decode now
    assert far.choices[0].text == near.choices[0].text
    far_logprobs, near_logprobs = far.choices[0].logprobs, near.choices[0].logprobs
    assert far_logprobs is not None
    assert near_logprobs is not None
    assert far_logprobs.token_logprobs == pytest.approx(near_logprobs.token_logprobs, abs=1e-3)


def test_prompts_may_be_text_ids_or_lists_of_either(client: OpenAI) -> None:
    ids = prompt_of(8, 49_000)
    for prompt, num_choices in (("Hello", 1), (ids, 1), (["a", "b"], 2), ([ids, ids], 2)):
        answer = client.completions.create(
            model="model", prompt=prompt, max_tokens=2, temperature=0
        )
        assert len(answer.choices) == num_choices


BAD_REQUESTS: list[tuple[dict[str, Any], int, str]] = [
    ({"model": "gpt-4"}, 404, "model"),
    ({"prompt": list(range(200)) * 50}, 400, "prompt"),
    ({"max_tokens": 9000}, 400, "max_tokens"),
    ({"max_tokens": 0}, 400, "max_tokens"),
    ({"max_tokens": "many"}, 400, "max_tokens"),
    ({"temperature": -1}, 400, "temperature"),
    ({"temperature": "hot"}, 400, "temperature"),
    ({"top_p": 0}, 400, "top_p"),
    ({"n": 0}, 400, "n"),
    ({"stop": [""]}, 400, "stop"),
    ({"prompt": []}, 400, "prompt"),
    ({"prompt": [50_000_000]}, 400, "prompt"),
    ({"prompt": {"text": "a"}}, 400, "prompt"),
    ({"logit_bias": {"5": 10}}, 400, "logit_bias"),
]


@pytest.mark.parametrize(("change", "status", "field"), BAD_REQUESTS)
def test_bad_request_is_a_4xx_that_names_the_field(
    stack: Stack, change: dict[str, Any], status: int, field: str
) -> None:
    body = {"model": "model", "prompt": "Hello", "max_tokens": 2} | change
    response = httpx.post(f"{stack.url}/v1/completions", json=body, timeout=30)
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert error["param"].startswith(field)
    assert field in error["message"]


def test_malformed_json_and_a_huge_body_are_refused(stack: Stack) -> None:
    response = httpx.post(f"{stack.url}/v1/completions", content=b'{"model": ', timeout=30)
    assert response.status_code == 400
    assert "JSON" in response.json()["error"]["message"]

    def hundred_mb() -> Iterator[bytes]:
        for _ in range(100):
            yield b"x" * 2**20

    try:
        response = httpx.post(f"{stack.url}/v1/completions", content=hundred_mb(), timeout=30)
    except httpx.WriteError:
        return  # refused while the body was still being sent
    assert response.status_code == 413


def test_no_metric_is_dead(stack: Stack, client: OpenAI) -> None:
    """Runs last in this module: after real traffic each metric has moved or is a state."""
    first, second = prompt_of(700, 49_000), prompt_of(699, 49_000)
    client.completions.create(model="model", prompt=first, max_tokens=4)
    client.completions.create(model="model", prompt=first[:320] + second, max_tokens=4)
    for worker in ("prefill-0", "decode-0"):
        stack.wait_idle(worker)
        samples = stack.metrics(worker)
        moved = {name.split("{")[0] for name, value in samples.items() if value}
        families = {name.split("{")[0] for name in samples if not name.endswith("_created")}
        families -= {name for name in families if name.endswith("_bucket")}
        states = {
            "sluice_running_requests",
            "sluice_waiting_requests",
            "sluice_queued_tokens",
            "sluice_kv_transfers_in_flight",
            "sluice_kv_receiving_requests",
            "sluice_kv_leases",
        }
        # These count what must not happen in a healthy run; the failure tests move them.
        faults = {
            "sluice_kv_block_alloc_failures_total",
            "sluice_kv_evictions_total",
            "sluice_kv_deferred_releases_total",
            "sluice_kv_double_releases_total",
            "sluice_kv_quarantine_alarms_total",
            "sluice_kv_checksum_failures_total",
            "sluice_kv_transfer_failures_total",
            "sluice_kv_stale_rejects_total",
            "sluice_kv_stale_epoch_rejects_total",
            "sluice_channel_rejects_total",
            "sluice_kv_load_failures_total",
            "sluice_kv_reads_total",
            "sluice_preemptions_total",
            "sluice_kv_block_withheld_seconds_count",
            "sluice_kv_block_withheld_seconds_sum",
            "sluice_kv_block_withheld_oldest_seconds",
            "sluice_kv_block_idle_before_evict_seconds_count",
            "sluice_kv_block_idle_before_evict_seconds_sum",
        }
        # Of a model with windows only; its own tests move it.
        windows = {"sluice_kv_window_releases_total"}
        assert families - moved - states - faults - windows == set(), worker


def test_readiness_and_health_answer(stack: Stack) -> None:
    assert stack.get("/health")[0] == 200
    assert stack.get("/ready")[0] == 200
    assert "sluice_requests_total" in stack.get("/metrics")[1]
    assert json.loads(stack.get("/v1/nothing")[1])["error"]["type"] == "invalid_request_error"
