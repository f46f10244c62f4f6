"""Talking to a stack as its users do, from one event loop."""

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import torch
from transformers import AutoModelForCausalLM


def prompt_of(num_tokens: int, vocab_size: int, *, seed: int = 0) -> list[int]:
    """Return ``num_tokens`` random token ids that are no special tokens."""
    generator = random.Random(seed * 100_003 + num_tokens)
    return [generator.randrange(100, vocab_size) for _ in range(num_tokens)]


def generate_reference(
    model_path: Path, prompts: Sequence[list[int]], *, num_tokens: int
) -> list[list[int]]:
    """Return what ``transformers`` generates greedily for each prompt alone, in float32."""
    # OpenMP's threads spin at each barrier: two of them crawl where anything else runs beside.
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None  # as with ignore_eos
    outputs: list[list[int]] = []
    for prompt in prompts:
        with torch.inference_mode():
            output = model.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                max_new_tokens=num_tokens,
                do_sample=False,
                pad_token_id=0,
            )
        outputs.append(output[0, len(prompt) :].tolist())
    return outputs


async def complete(
    client: httpx.AsyncClient, prompt: list[int], *, name: str = "", **body: Any
) -> dict[str, Any]:
    """Return the answer to one completion request, with token ids as logprobs' tokens.

    A ``name`` is its ``x-request-id``.
    """
    response = await client.post(
        "/v1/completions",
        json={"model": "model", "prompt": prompt, "temperature": 0, **body},
        headers={"x-sluice-stats": "1"} | ({"x-request-id": name} if name else {}),
    )
    assert response.status_code == 200, response.text
    return response.json()


async def complete_all(url: str, prompts: Sequence[list[int]], **body: Any) -> list[dict[str, Any]]:
    """Return the answers to all prompts, asked for at once."""
    async with httpx.AsyncClient(base_url=url, timeout=300) as client:
        return await asyncio.gather(*(complete(client, prompt, **body) for prompt in prompts))
