"""Whether a deployment answers as ``transformers`` does, token for token."""

import asyncio
from collections.abc import Sequence
from typing import Any

from tests.integration.requests import complete_all
from tests.integration.stack import Stack

FLOAT32 = {"dtype": "float32"}


def assert_same(
    answers: Sequence[dict[str, Any]], expected: Sequence[list[int]], prompts: Sequence[list[int]]
) -> None:
    for answer, tokens, prompt in zip(answers, expected, prompts, strict=True):
        choice = answer["choices"][0]
        assert choice["token_ids"] == tokens, (len(prompt), answer["sluice"])


def run(stack: Stack, prompts: Sequence[list[int]], num_tokens: int) -> list[dict[str, Any]]:
    return asyncio.run(
        complete_all(
            stack.url, prompts, max_tokens=num_tokens, ignore_eos=True, return_token_ids=True
        )
    )
