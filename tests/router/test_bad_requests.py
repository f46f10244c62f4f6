"""A wrong request gets a 4xx in OpenAI's form that names field and fix; no worker sees it."""

import json
from typing import Any

import httpx
import openai
import pytest

from tests.router.conftest import MODEL, RunningRouter, StartRouter
from tests.router.model_folder import EOS, MAX_MODEL_LEN, make_model_folder
from tests.router.scripted_worker import say

COMPLETION: dict[str, Any] = {"model": MODEL, "prompt": "a", "max_tokens": 2}
CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
HUGE = 10**30

BAD_COMPLETIONS: list[tuple[dict[str, Any], str | None]] = [
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": None}, "prompt"),
    ({"prompt": 5}, "prompt"),
    ({"prompt": {"text": "a"}}, "prompt"),
    ({"prompt": ["a", 3]}, "prompt"),
    ({"prompt": [1, "a"]}, "prompt"),
    ({"prompt": [[1], "a", [None]]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [True]}, "prompt"),
    ({"prompt": [1.0]}, "prompt"),
    ({"prompt": [HUGE]}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": ["a"] * 300}, "prompt"),
    ({"prompt": [5] * MAX_MODEL_LEN}, "prompt"),
    ({"prompt": "the fox " * 100_000}, "prompt"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": "5"}, "max_tokens"),
    ({"max_tokens": 5.5}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"max_tokens": HUGE}, "max_tokens"),
    ({"max_tokens": MAX_MODEL_LEN}, "max_tokens"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"min_tokens": 3}, "min_tokens"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": [1]}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.1}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 1.5}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"frequency_penalty": -3}, "frequency_penalty"),
    ({"seed": "x"}, "seed"),
    ({"seed": HUGE}, "seed"),
    ({"n": 0}, "n"),
    ({"n": 129}, "n"),
    ({"n": "2"}, "n"),
    ({"stop": ""}, "stop[0]"),
    ({"stop": ["a", ""]}, "stop[1]"),
    ({"stop": [1]}, "stop[0]"),
    ({"stop": ["a"] * 17}, "stop"),
    ({"stop": {}}, "stop"),
    ({"stop_token_ids": ["a"]}, "stop_token_ids[0]"),
    ({"stop_token_ids": [100_000]}, "stop_token_ids"),
    ({"logprobs": 21}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"echo": True, "logprobs": 1}, None),
    ({"echo": "yes"}, "echo"),
    ({"best_of": 2}, None),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, None),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"suffix": "tail"}, "suffix"),
    ({"logit_bias": {"5": 1}}, "logit_bias"),
    ({"ignore_eos": 1}, "ignore_eos"),
    ({"cache_salt": 5}, "cache_salt"),
    ({"model": ""}, "model"),
    ({"model": 5}, "model"),
    ({"model": None}, "model"),
]

BAD_CHATS: list[tuple[dict[str, Any], str | None]] = [
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [5]}, "messages[0]"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "king", "content": "hi"}]}, "messages[0].role"),
    ({"messages": [{"role": "tool", "content": "hi"}]}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, None),
    ({"messages": [{"role": "user", "content": "x " * 600}]}, "messages"),
    ({"tools": [{"type": "function"}]}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"response_format": {"type": "json_schema"}}, "response_format"),
    ({"audio": {}}, "audio"),
    ({"modalities": ["text", "audio"]}, "modalities"),
    ({"logprobs": 2}, "logprobs"),
    ({"top_logprobs": 2}, None),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"max_tokens": 5, "max_completion_tokens": 6}, None),
    ({"max_completion_tokens": MAX_MODEL_LEN}, "max_tokens"),
]

NOT_JSON = [
    b"",
    b"{",
    b"hello",
    b"[]",
    b'"text"',
    b"null",
    b'{"model": NaN}',
    b'{"temperature": Infinity}',
    b'{"temperature": 1e999}',
    b'{"prompt": "\\ud800"}',
    b'{"prompt": "\xff\xfe"}',
    b"\xef\xbb\xbf{}",
    b"[" * 100_000,
    b'{"prompt": ' + b"[" * 50_000,
    b"1" * 5_000,
]


def _check_error(answer: httpx.Response, status: int) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert error["message"]
    return error


async def test_100_bad_requests_are_told_what_is_wrong_and_change_no_worker(
    router: RunningRouter,
) -> None:
    worker = await router.start_worker(say([20, EOS]))

    for change, field in BAD_COMPLETIONS:
        answer = await router.http.post("/v1/completions", json=COMPLETION | change)
        error = _check_error(answer, 400)
        assert error["param"] == field, (change, error)
        assert field is None or error["message"].startswith((field, field.partition("[")[0]))
    for change, field in BAD_CHATS:
        answer = await router.http.post("/v1/chat/completions", json=CHAT | change)
        error = _check_error(answer, 400)
        assert field is None or error["param"] == field, (change, error)
    for body in NOT_JSON:
        answer = await router.http.post("/v1/completions", content=body)
        assert "JSON" in _check_error(answer, 400)["message"]

    assert worker.generates == []
    assert (await router.http.get("/ready")).status_code == 200
    assert (await router.http.post("/v1/completions", json=COMPLETION)).status_code == 200


async def test_fields_that_ask_for_nothing_are_accepted(router: RunningRouter) -> None:
    worker = await router.start_worker(say([20, EOS]))
    body = CHAT | {
        "tools": [],
        "tool_choice": "auto",
        "response_format": {"type": "text"},
        "logit_bias": {},
        "stop": None,
        "seed": None,
        "user": "me",
        "metadata": {"a": "b"},
        "parallel_tool_calls": True,
        "store": False,
        "field_of_the_future": 1,
        "top_k": -1,
        "temperature": 1,
        "messages": [
            {"role": "system", "content": [{"type": "text", "text": "a\0b"}]},
            {"role": "user", "content": "\N{GRINNING FACE}", "name": "me"},
            {"role": "assistant", "content": "ok", "tool_calls": []},
        ],
    }
    answer = await router.http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    (generate,) = worker.generates
    assert generate.sampling.max_tokens == MAX_MODEL_LEN - len(generate.prompt_token_ids)


async def test_unknown_model_is_a_404(router: RunningRouter) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        await router.openai.chat.completions.create(
            model="gpt-9", messages=[{"role": "user", "content": "hi"}]
        )
    assert caught.value.code == "model_not_found"
    assert MODEL in str(caught.value)
    with pytest.raises(openai.NotFoundError):
        await router.openai.models.retrieve("gpt-9")


async def test_too_long_a_prompt_has_openais_code(router: RunningRouter) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await router.openai.completions.create(model=MODEL, prompt=[5] * 600, max_tokens=5)
    assert caught.value.code == "context_length_exceeded"
    assert str(MAX_MODEL_LEN) in str(caught.value)


async def test_unknown_path_and_wrong_method_have_the_same_form(router: RunningRouter) -> None:
    assert "/v2/x" in _check_error(await router.http.get("/v2/x"), 404)["message"]
    assert "POST" in _check_error(await router.http.get("/v1/completions"), 405)["message"]


async def test_model_without_a_template_refuses_chats_only(
    start_router: StartRouter, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = make_model_folder(tmp_path_factory.mktemp("plain"), chat_template=False)
    router = await start_router(path=path)
    await router.start_worker(say([20, EOS]))
    answer = await router.http.post("/v1/chat/completions", json=CHAT)
    assert "/v1/completions" in _check_error(answer, 400)["message"]
    assert (await router.http.post("/v1/completions", json=COMPLETION)).status_code == 200


@pytest.mark.parametrize("chunked", [False, True])
async def test_100_mb_body_is_refused_without_being_read(
    router: RunningRouter, *, chunked: bool
) -> None:
    sent = 0

    async def parts() -> Any:
        nonlocal sent
        part = b"x" * 2**20
        for _ in range(100):
            sent += len(part)
            yield part

    headers = {} if chunked else {"content-length": str(100 * 2**20)}
    answer = await router.http.post("/v1/completions", content=parts(), headers=headers)
    error = _check_error(answer, 413)
    assert error["code"] == "request_too_large"
    assert "8 MiB" in error["message"]
    assert await router.metric('sluice_rejections_total{reason="too_large"}') == 1


async def test_errors_are_plain_json_with_the_request_id(router: RunningRouter) -> None:
    answer = await router.http.post(
        "/v1/completions", json={"model": MODEL}, headers={"x-request-id": "abc"}
    )
    assert json.loads(answer.content)["error"]["message"] == "prompt: this field is required"
    assert answer.headers["x-request-id"] == "abc"
