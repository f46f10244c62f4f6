"""A stack under load, watched: what ``sluice top`` shows moves, and every line of the logs is JSON.

The failures guarded against: a figure whose metric was renamed and is 0 for ever, a log line that
a collector cannot read, a request that cannot be followed from process to process.
"""

import asyncio
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from deploy.api_client import ApiClient
from deploy.top import command
from deploy.top.command import take_look
from deploy.top.figures import TopFigures, TopHistory
from tests.integration.models import VOCAB_SIZE, tiny_model
from tests.integration.requests import complete, prompt_of
from tests.integration.stack import ANSWER_TIMEOUT_S, Stack

pytestmark = [pytest.mark.ucx, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[2]
LONG = 200
LOGGED = {"ts", "level", "logger", "worker", "role", "event"}


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the processes of the stack write."""
    return tmp_path_factory.mktemp("logs") / "stderr"


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory, logs: Path) -> Iterator[Stack]:
    own = os.dup(2)
    file = os.open(logs, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    try:
        os.dup2(file, 2)  # what processes inherit that are started now
        with Stack.open(
            tiny_model("llama", tmp_path_factory.mktemp("models")),
            model={"dtype": "float32"},
            cache={"memory_gib": 0.02, "block_size": 16},
            router={"local_prefill_max_tokens": 64},
            log_format="json",
            own_interpreters=True,  # how progress is shown is settled before imports
        ) as stack:
            os.dup2(own, 2)
            yield stack
    finally:
        os.dup2(own, 2)
        os.close(file)
        os.close(own)


async def ask(stack: Stack, *seeds: int) -> list[dict[str, Any]]:
    async with httpx.AsyncClient(base_url=stack.url, timeout=60) as client:
        prompts = [prompt_of(LONG, VOCAB_SIZE, seed=seed) for seed in seeds]
        return await asyncio.gather(
            *(complete(client, prompt, max_tokens=8, ignore_eos=True) for prompt in prompts)
        )


@pytest.fixture
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that waits for a processor is asked for as long as it takes."""
    monkeypatch.setattr(command, "SCRAPE_TIMEOUT_S", ANSWER_TIMEOUT_S)


def figures_after(stack: Stack, *seeds: int) -> TopFigures:
    client, history = ApiClient(stack.url, timeout_s=ANSWER_TIMEOUT_S), TopHistory()
    with ThreadPoolExecutor() as pool:
        history.add(take_look(client, pool))
        asyncio.run(ask(stack, *seeds))
        return history.add(take_look(client, pool))


@pytest.mark.usefixtures("_patient")
def test_what_top_shows_moves_with_real_requests(stack: Stack) -> None:
    figures = figures_after(stack, 1, 2, 3, 1)

    prefill, decode = figures.workers
    assert (prefill.status.worker_id, decode.status.worker_id) == ("prefill-0", "decode-0")
    assert figures.is_ready
    assert figures.requests_per_s is not None
    assert round(figures.requests_per_s * figures.window_s) == 4
    assert round((figures.input_per_s or 0) * figures.window_s) == 4 * LONG
    # Each first token comes from the prefill worker, where there was one to ask.
    assert 4 * 7 <= round((figures.output_per_s or 0) * figures.window_s) <= 4 * 8
    assert figures.failures_per_s == 0
    for p50, p99 in (figures.ttft_s, figures.itl_s):
        assert p50 is not None
        assert p99 is not None
        assert 0 < p50 <= p99
    for worker in figures.workers:
        assert worker.is_answering
        assert sum((worker.blocks or {}).values()) == worker.status.load.total_blocks
        assert (worker.input_per_s or 0) > 0
        assert worker.hit_share is not None
    assert (decode.nbytes_per_s or 0) > 0
    assert decode.read_p99_s is not None
    assert sum((decode.paths or {}).values()) == 1


def test_top_once_prints_one_picture_of_80_columns(stack: Stack) -> None:
    top = [sys.executable, "-m", "deploy.main", "top", "--once", "--interval", "0.2"]
    done = subprocess.run(
        [*top, "--url", f"{stack.url}/v1"],
        cwd=ROOT,
        env={**os.environ, "COLUMNS": "80"},
        capture_output=True,
        text=True,
        timeout=200,
        check=True,
    )

    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0].startswith(f"{stack.url}  model  ready")
    assert [line.split()[0] for line in lines if re.match(r"(prefill|decode)-\d", line)] == [
        "prefill-0",
        "decode-0",
    ]
    assert done.stderr == ""


def test_every_line_is_json_and_a_request_can_be_followed(stack: Stack, logs: Path) -> None:
    (answer,) = asyncio.run(ask(stack, 9))

    written, _, _being_written = logs.read_text().rpartition("\n")
    lines = [json.loads(line) for line in written.splitlines()]

    assert all(line.keys() >= LOGGED for line in lines)
    by_role = {(line["worker"], line["role"]) for line in lines}
    assert by_role == {("router", "router"), ("prefill-0", "prefill"), ("decode-0", "decode")}
    (finished,) = [line for line in lines if line.get("request") == answer["id"]] or [
        line
        for line in lines
        if line["event"] == "finished" and str(line["request"]).startswith(answer["id"])
    ]
    assert finished["event"] == "finished"
    assert finished["attempt"] == 1
    assert (finished["prompt_tokens"], finished["output_tokens"]) == (LONG, 8)
