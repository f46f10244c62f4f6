"""A conversation goes on where host memory or storage has its KV, with the same words.

The failures guarded against: a block that comes back with other bytes than it left with, or before
they are there; a request that waits for a storage that is gone; blocks that a tier keeps for ever.
"""

import asyncio
import itertools
import time
from pathlib import Path
from typing import Any

import pytest

from deploy.cli.parser import run
from tests.integration.models import VOCAB_SIZE, tiny_model
from tests.integration.requests import complete_all, generate_reference, prompt_of
from tests.integration.stack import ANSWER_TIMEOUT_S, Stack

pytestmark = [pytest.mark.ucx, pytest.mark.timeout(300)]

FIRST_TURN = 200
"""Tokens: more than half of the pool."""
NUM_NEW = 12
BLOCK_SIZE = 16
NUM_BLOCKS = 24
"""Of the pool, per KV group of the model."""
HOST = {"host_tier_gib": 0.01, "host_copy_fraction": 1.0}
PATIENT = {"storage_timeout_s": 60.0}
"""Where a hit is demanded: what storage does not answer in time is computed."""
FLOAT32 = {"dtype": "float32"}


def say(stack: Stack, prompts: list[list[int]]) -> list[list[int]]:
    """Return the answers, one prompt after the other."""

    async def one_by_one() -> list[dict[str, Any]]:
        options = {"max_tokens": NUM_NEW, "ignore_eos": True, "return_token_ids": True}
        return [
            answer
            for prompt in prompts
            for answer in await complete_all(stack.url, [prompt], **options)
        ]

    return [answer["choices"][0]["token_ids"] for answer in asyncio.run(one_by_one())]


def two_turns(model: Path) -> tuple[list[list[int]], list[list[int]]]:
    """Return prompts of which the last continues the first, with what is to be answered.

    Those between need the whole pool, again and again, so the first one's blocks do not stay there.
    """
    first = prompt_of(FIRST_TURN, VOCAB_SIZE, seed=1)
    between = [prompt_of(330, VOCAB_SIZE, seed=seed) for seed in range(2, 8)]
    expected = generate_reference(model, [first, *between], num_tokens=NUM_NEW)
    second = [*first, *expected[0], *prompt_of(20, VOCAB_SIZE, seed=4)]
    expected += generate_reference(model, [second], num_tokens=NUM_NEW)
    return [first, *between, second], expected


def hits(stack: Stack, worker: str, tier: str) -> float:
    role = worker.partition("-")[0]
    sample = f'sluice_prefix_cache_hit_tokens_total{{role="{role}",tier="{tier}"}}'
    return stack.metrics(worker).get(sample, 0.0)


def wait_written(stack: Stack, worker: str, count: int) -> None:
    """Return once ``count`` blocks are in storage."""
    role = worker.partition("-")[0]
    sample = f'sluice_kv_tier_stores_total{{result="done",role="{role}",tier="storage"}}'
    deadline = time.monotonic() + ANSWER_TIMEOUT_S
    while stack.metrics(worker).get(sample, 0) < count:
        assert time.monotonic() < deadline, stack.metrics(worker)
        time.sleep(0.05)


def replace_by_file(folder: Path) -> None:
    """Put a file where ``folder`` is, though a worker may still store into it, or make it anew."""
    for number in itertools.count():
        folder.rename(folder.with_name(f"{folder.name}-{number}"))
        try:
            folder.write_text("not a directory")
        except IsADirectoryError:
            continue
        return


@pytest.mark.parametrize(
    ("family", "num_groups", "prefill"),
    [
        ("llama", 1, 1),
        ("gemma3", 6, 0),
        pytest.param("llama", 1, 0, marks=pytest.mark.slow),
        pytest.param("gemma3", 6, 1, marks=pytest.mark.slow),
    ],
)
def test_a_second_turn_is_loaded_from_host_memory(
    family: str, num_groups: int, prefill: int, tmp_path: Path
) -> None:
    model = tiny_model(family, tmp_path)
    prompts, expected = two_turns(model)
    with Stack.open(
        model,
        model=FLOAT32,
        cache={"num_blocks": num_groups * NUM_BLOCKS, "poison": True, **HOST},
        deploy={"prefill": prefill},
    ) as stack:
        assert say(stack, prompts) == expected
        names = ("decode-0", "prefill-0")[: 1 + prefill]
        assert sum(hits(stack, name, "host") for name in names) >= FIRST_TURN - BLOCK_SIZE
        for name in names:
            stack.wait_idle(name)


@pytest.mark.parametrize(
    ("family", "num_groups"), [("gemma3", 6), pytest.param("llama", 1, marks=pytest.mark.slow)]
)
def test_a_second_turn_is_read_from_storage_by_a_new_worker(
    family: str, num_groups: int, tmp_path: Path
) -> None:
    model = tiny_model(family, tmp_path)
    (first, *_, second), (first_answer, *_, second_answer) = two_turns(model)
    with Stack.open(
        model,
        model=FLOAT32,
        cache={
            "num_blocks": num_groups * NUM_BLOCKS,
            **HOST,
            **PATIENT,
            "storage_url": (tmp_path / "kv").as_uri(),
        },
        deploy={"prefill": 0},
        own_interpreters=True,  # names in storage must not hang on one process's hash
    ) as stack:
        assert say(stack, [first]) == [first_answer]
        wait_written(stack, "decode-0", FIRST_TURN // BLOCK_SIZE)

        # When another process takes its place, with nothing but the storage
        stack.kill("decode-0")
        stack.start("decode-0")
        stack.wait_ready()

        assert say(stack, [second]) == [second_answer]
        assert hits(stack, "decode-0", "storage") >= FIRST_TURN - BLOCK_SIZE
        stack.wait_idle("decode-0")


def test_storage_that_was_damaged_or_is_gone_costs_time_and_no_word(tmp_path: Path) -> None:
    model = tiny_model("llama", tmp_path)
    (first, *_, second), (first_answer, *_, second_answer) = two_turns(model)
    folder = tmp_path / "kv"
    with Stack.open(
        model,
        model=FLOAT32,
        cache={
            "num_blocks": NUM_BLOCKS,
            **HOST,
            "storage_url": folder.as_uri(),
            "storage_timeout_s": 1.0,
        },
        deploy={"prefill": 0},
    ) as stack:
        assert say(stack, [first]) == [first_answer]
        wait_written(stack, "decode-0", FIRST_TURN // BLOCK_SIZE)
        stack.kill("decode-0")
        for number, path in enumerate(sorted(folder.rglob("*-0"))):
            content = bytearray(path.read_bytes())
            content[len(content) // 2] ^= 1
            path.write_bytes(content[: -1 if number % 2 else None])
        stack.start("decode-0")
        stack.wait_ready()

        # Given blocks of which each was changed or cut off, none is used
        assert say(stack, [second]) == [second_answer]
        assert hits(stack, "decode-0", "storage") == 0

        # And one that is no directory any more is an error of each call, not of a request
        replace_by_file(folder)
        assert say(stack, [first]) == [first_answer]
        stack.wait_idle("decode-0")


def test_a18_what_was_reset_does_not_come_back_with_a_new_worker(tmp_path: Path) -> None:
    model = tiny_model("llama", tmp_path)
    (first, *_, second), (first_answer, *_, second_answer) = two_turns(model)
    with Stack.open(
        model,
        model=FLOAT32,
        cache={
            "num_blocks": NUM_BLOCKS,
            **HOST,
            "storage_url": (tmp_path / "kv").as_uri(),
        },
        deploy={"prefill": 0},
    ) as stack:
        assert say(stack, [first]) == [first_answer]
        wait_written(stack, "decode-0", FIRST_TURN // BLOCK_SIZE)
        stack.wait_idle("decode-0")

        # When it is reset and told as done, and the worker dies before anything else is asked
        assert run(["cache", "reset", "--url", stack.url, "--wait", "60"]) == 0
        stack.kill("decode-0")
        stack.start("decode-0")
        stack.wait_ready()

        assert say(stack, [second]) == [second_answer]
        assert hits(stack, "decode-0", "storage") == 0


def test_a_prompt_whose_first_tokens_decode_has_is_read_from_storage_by_prefill(
    tmp_path: Path,
) -> None:
    model = tiny_model("llama", tmp_path)
    (first, *_, second), (first_answer, *_, second_answer) = two_turns(model)
    with Stack.open(
        model,
        model=FLOAT32,
        cache={
            "num_blocks": NUM_BLOCKS,
            **HOST,
            **PATIENT,
            "storage_url": (tmp_path / "kv").as_uri(),
        },
        router={"local_prefill_max_tokens": 0},
        deploy={"prefill": 1},
    ) as stack:
        assert say(stack, [first]) == [first_answer]
        wait_written(stack, "prefill-0", FIRST_TURN // BLOCK_SIZE)

        # When another process takes prefill's place, while decode still has the first turn
        stack.kill("prefill-0")
        stack.start("prefill-0")
        stack.wait_ready()

        assert say(stack, [second]) == [second_answer]
        assert hits(stack, "decode-0", "device") >= FIRST_TURN - BLOCK_SIZE
        assert hits(stack, "prefill-0", "storage") >= FIRST_TURN - BLOCK_SIZE
        for name in ("decode-0", "prefill-0"):
            stack.wait_idle(name)
