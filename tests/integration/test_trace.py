"""A real request leaves a trace of every process, in the order in which things happen.

The failures guarded against: a trace in which a read begins before its ticket, or one that is
missing what the operator looks for: when what was computed, offered, read and given back.
"""

import json
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from deploy.cli.parser import run
from tests.integration.models import VOCAB_SIZE, tiny_model
from tests.integration.requests import prompt_of
from tests.integration.stack import ANSWER_TIMEOUT_S, Stack

pytestmark = [pytest.mark.ucx, pytest.mark.timeout(300)]

LONG = 200
CHUNK = 64


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with Stack.open(
        tiny_model("llama", tmp_path_factory.mktemp("models")),
        model={"dtype": "float32"},
        cache={"memory_gib": 0.02, "block_size": 16},
        scheduler={"max_batch_tokens": CHUNK},
        router={"local_prefill_max_tokens": 64},
        trace_requests=8,
    ) as stack:
        yield stack


def ask(stack: Stack, prompt: list[int], **more: object) -> str:
    """Return the ``x-request-id`` of a completion."""
    body = {"model": "model", "prompt": prompt, "max_tokens": 4, "ignore_eos": True, **more}
    response = httpx.post(f"{stack.url}/v1/completions", json=body, timeout=60)
    assert response.status_code == 200, response.text
    return response.headers["x-request-id"]


def trace(stack: Stack, name: str) -> dict[str, dict[str, Any]]:
    """Return what each process recorded, by its name."""
    response = httpx.get(f"{stack.url}/v1/trace/{name}", timeout=ANSWER_TIMEOUT_S)
    assert response.status_code == 200, response.text
    return {process["name"]: process for process in response.json()["processes"]}


def trace_when(
    stack: Stack, name: str, condition: Callable[[dict[str, dict[str, Any]]], object]
) -> dict[str, dict[str, Any]]:
    """Return the trace once it is so; each process records its part in its own time."""
    deadline = time.monotonic() + ANSWER_TIMEOUT_S
    while not condition(found := trace(stack, name)):
        assert time.monotonic() < deadline, found
        time.sleep(0.05)
    return found


def all_are_there(found: dict[str, dict[str, Any]]) -> bool:
    """Whether each process was reached, and prefill, where it was asked, has its blocks back."""
    if {process["status"] for process in found.values()} != {"ok"}:
        return False
    return "prefill-0" not in found or bool(times(found["prefill-0"], "released"))


def times(process: dict[str, Any], event: str) -> list[float]:
    return [entry["at_s"] for entry in process["events"] if entry["event"] == event]


def test_a_disaggregated_request_is_traced_from_arrival_to_release(stack: Stack) -> None:
    name = ask(stack, prompt_of(LONG, VOCAB_SIZE, seed=1))
    found = trace_when(stack, name, all_are_there)

    assert list(found) == ["router", "decode-0", "prefill-0"]
    router, decode, prefill = found.values()
    assert [entry["event"] for entry in router["events"]] == [
        "arrived",
        "tokenized",
        "dispatched",
        "first_token",
        "finished",
    ]
    # Every ticket that was sent has come, and has been read, and nothing else has
    sent, came = times(prefill, "ticket_sent"), times(decode, "ticket")
    posted, landed = times(decode, "read_posted"), times(decode, "read_landed")
    assert len(sent) == len(came) == len(posted) == len(landed) >= LONG // CHUNK
    slack_s = prefill["uncertainty_s"] + decode["uncertainty_s"]
    for sent_at, came_at, posted_at, landed_at in zip(sent, came, posted, landed, strict=True):
        assert sent_at <= came_at + slack_s
        assert came_at <= posted_at <= landed_at
    steps = [entry for entry in prefill["events"] if entry["event"] == "step"]
    assert sum(step["values"]["tokens"] for step in steps) == LONG
    assert times(prefill, "received") < times(prefill, "admitted") < times(prefill, "ticket_sent")
    assert times(decode, "delivered") >= landed[-1:]
    assert len(times(decode, "first_token")) == len(times(decode, "finished")) == 1
    assert len(times(prefill, "released")) == 1


def test_a_local_request_has_steps_on_decode_and_asks_nobody_else(stack: Stack) -> None:
    found = trace_when(stack, ask(stack, prompt_of(40, VOCAB_SIZE, seed=2)), all_are_there)
    assert list(found) == ["router", "decode-0"]
    events = [entry["event"] for entry in found["decode-0"]["events"]]
    assert events == ["received", "step", "first_token", "finished"]


def test_a_client_that_leaves_is_in_the_trace_of_every_process(stack: Stack) -> None:
    prompt = prompt_of(LONG, VOCAB_SIZE, seed=40)
    # More tokens than it can have before it has left, and none that ends them
    body = {"model": "model", "prompt": prompt, "max_tokens": 1800, "ignore_eos": True}
    with (
        httpx.Client(base_url=stack.url, timeout=60) as client,
        client.stream("POST", "/v1/completions", json=body | {"stream": True}) as response,
    ):
        name = response.headers["x-request-id"]
        next(response.iter_lines())
    found = trace_when(
        stack,
        name,
        lambda found: all_are_there(found) and times(found["decode-0"], "aborted"),
    )
    assert found["router"]["events"][-1]["event"] == "left"
    assert found["router"]["events"][-1]["values"] == {"cause": "client"}
    assert found["decode-0"]["events"][-1]["event"] == "aborted"
    assert len(times(found["prefill-0"], "released")) == 1


def test_old_requests_are_forgotten(stack: Stack) -> None:
    name = ask(stack, prompt_of(40, VOCAB_SIZE, seed=3))
    for seed in range(4, 12):
        ask(stack, prompt_of(40, VOCAB_SIZE, seed=seed))
    response = httpx.get(f"{stack.url}/v1/trace/{name}", timeout=ANSWER_TIMEOUT_S)
    assert response.status_code == 404
    assert "the last 8 (trace_requests)" in response.json()["error"]["message"]


def test_the_command_draws_a_running_deployments_request(
    stack: Stack, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = ask(stack, prompt_of(LONG, VOCAB_SIZE, seed=20))
    for suffix in ("svg", "json"):
        out = tmp_path / f"request.{suffix}"
        assert run(["trace", name, "--url", stack.url, "--out", str(out)]) == 0
        assert str(out) in capsys.readouterr().out.replace("\n", "")
    assert (tmp_path / "request.svg").read_text().startswith("<svg")
    assert len(json.loads((tmp_path / "request.json").read_text())["processes"]) == 3

    assert run(["trace", "cmpl-nothing", "--url", stack.url]) == 1
    assert "unknown here" in capsys.readouterr().err


def test_the_command_shows_the_sequence_that_is_chosen_and_names_its_sisters(
    stack: Stack, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = ask(stack, prompt_of(40, VOCAB_SIZE, seed=21), n=2)
    out = tmp_path / "way.json"
    command = ["trace", name, "--url", stack.url, "--out", str(out)]

    assert run(command) == 0
    first = json.loads(out.read_text())
    assert first["request_id"] == first["choices"][0]
    assert run([*command, "--choice", "1"]) == 0
    second = json.loads(out.read_text())
    assert (second["request_id"], second["choices"]) == (first["choices"][1], first["choices"])
    shown = capsys.readouterr().out
    assert "choice 0, of 0 to 1" in shown
    assert "choice 1, of 0 to 1" in shown

    assert run([*command, "--choice", "2"]) == 2
    assert "--choice 2: the request has choices 0 to 1; give one" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        run([*command, "--choice", "-1"])
    assert "--choice: '-1' is no index of a choice" in capsys.readouterr().err


def test_a_request_whose_source_froze_tells_so_and_can_be_drawn(
    stack: Stack, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ask(stack, prompt_of(LONG, VOCAB_SIZE, seed=30))
    stack.kill("prefill-0", signal_number=signal.SIGSTOP)
    name = ask(stack, prompt_of(LONG, VOCAB_SIZE, seed=31))
    try:
        found = trace(stack, name)
        out = tmp_path / "frozen.svg"
        assert run(["trace", name, "--url", stack.url, "--out", str(out)]) == 0
    finally:
        stack.kill("prefill-0", signal_number=signal.SIGCONT)
    assert found["prefill-0"]["status"] == "unreachable"
    decode = [entry["event"] for entry in found["decode-0"]["events"]]
    assert decode[:3] == ["received", "prefill_asked", "recomputing"]
    assert decode[-2:] == ["first_token", "finished"]
    assert "silent for" in out.read_text()
    assert "prefill-0: did not answer" in capsys.readouterr().out
