"""Layers are read while later ones still compute, and nobody can tell from the text.

Every block is compared with what was sent, piece by piece, and free blocks are poisoned: a layer
that was read before it was written, or a piece that landed in other blocks than its siblings, ends
the request or the worker. How much is hidden is measured elsewhere; here is what must not change.
"""

import asyncio
import contextlib
import time
from pathlib import Path

import httpx
import pytest

from tests.integration.models import VOCAB_SIZE, tiny_model
from tests.integration.parity import FLOAT32, assert_same, run
from tests.integration.requests import complete, generate_reference, prompt_of
from tests.integration.stack import Stack

pytestmark = [pytest.mark.ucx, pytest.mark.timeout(300)]

CHUNK = 64
LENGTHS = (65, 64, 200, 333)


def num_tickets(length: int, num_cuts: int) -> int:
    """One for each chunk but the last, which has one for each cut."""
    return -(-length // CHUNK) - 1 + num_cuts


@pytest.mark.parametrize(
    ("family", "layer_ranges", "num_cuts"),
    [
        ("llama", 4, 4),
        pytest.param("gemma3", 2, 2, marks=pytest.mark.slow),
        pytest.param("gpt_oss", 64, 2, marks=pytest.mark.slow),
    ],
)
def test_b12_c24_layers_that_come_while_others_compute_are_those_that_were_computed(
    family: str, layer_ranges: int, num_cuts: int, tmp_path: Path
) -> None:
    model_path = tiny_model(family, tmp_path)
    prompts = [prompt_of(length, VOCAB_SIZE, seed=at) for at, length in enumerate(LENGTHS)]
    expected = generate_reference(model_path, prompts, num_tokens=24)
    with Stack.open(
        model_path,
        model=FLOAT32,
        cache={"memory_gib": 0.05, "poison": True, "prefix_caching": False},
        scheduler={"max_batch_tokens": CHUNK},
        transfer={"layer_ranges": layer_ranges, "checksums": True},
        router={"local_prefill_max_tokens": 32},
    ) as stack:
        # One after another, so that each chunk is as long as it can be
        for prompt, tokens in zip(prompts, expected, strict=True):
            (answer,) = run(stack, [prompt], 24)
            assert_same([answer], [tokens], [prompt])
            assert answer["sluice"]["num_tickets"] == num_tickets(len(prompt), num_cuts)
        # And all at once
        assert_same(run(stack, prompts, 24), expected, prompts)
        for worker in ("prefill-0", "decode-0"):
            stack.wait_idle(worker)
        failures = [
            value
            for name, value in stack.metrics("decode-0").items()
            if name.startswith("sluice_kv_checksum_failures_total")
        ]
        assert failures == [0.0]


def test_d08_clients_that_leave_between_ranges_leave_nothing_behind(tmp_path: Path) -> None:
    model_path = tiny_model("llama", tmp_path)
    prompts = [prompt_of(600, VOCAB_SIZE, seed=at) for at in range(8)]
    expected = generate_reference(model_path, prompts[:1], num_tokens=8)

    async def leave_at_any_time(url: str) -> None:
        async with httpx.AsyncClient(base_url=url, timeout=60) as client:
            begin = time.monotonic()
            await complete(client, prompts[0], max_tokens=8)
            whole_s = time.monotonic() - begin
            for at, prompt in enumerate(prompts[1:], start=1):
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(whole_s * at / len(prompts)):
                        await complete(client, prompt, max_tokens=8)

    with Stack.open(
        model_path,
        model=FLOAT32,
        cache={"memory_gib": 0.05, "poison": True, "prefix_caching": False},
        scheduler={"max_batch_tokens": 2048},
        transfer={"layer_ranges": 4, "checksums": True},
    ) as stack:
        asyncio.run(leave_at_any_time(stack.url))
        for worker in ("prefill-0", "decode-0"):
            stack.wait_idle(worker)
        assert_same(run(stack, prompts[:1], 8), expected, prompts[:1])
