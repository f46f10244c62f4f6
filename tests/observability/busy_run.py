"""A deployment that has met what deployments meet: work, refusals, cancels, deaths, a full pool."""

import asyncio
import itertools
import signal
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from tests.integration.models import VOCAB_SIZE, tiny_model
from tests.integration.requests import complete, prompt_of
from tests.integration.stack import Stack
from tests.integration.streams import stream

PROMPT = 150
"""Tokens: over ``local_prefill_max_tokens``, so prefill computes them."""
SHORT = 20


@contextmanager
def open_stack(folder: Path) -> Iterator[Stack]:
    """Start 1P1D with small pools, all tiers, checks of bytes and vLLM's names."""
    storage = folder / "storage"
    storage.mkdir()
    with Stack.open(
        tiny_model("llama", folder / "models"),
        model={"dtype": "float32"},
        cache={
            "memory_gib": 0.002,
            "block_size": 16,
            "host_tier_gib": 0.002,
            "storage_url": storage.as_uri(),
            "poison": True,
        },
        transfer={"checksums": True},
        scheduler={"max_num_seqs": 16},
        router={
            "local_prefill_max_tokens": 64,
            "admission_wait_s": 60.0,
            "max_pending_requests": 24,
        },
        metrics={"vllm_aliases": True},
    ) as stack:
        yield stack


async def meet_trouble(stack: Stack) -> None:
    """Kill each worker while it works, and start it again: requests are retried or computed."""
    async with httpx.AsyncClient(base_url=stack.url, timeout=120) as client:
        for name, seed in (("decode-0", 900), ("prefill-0", 910)):
            is_killed = asyncio.Event()
            asking = [
                asyncio.create_task(_ask_until(is_killed, client, seed + index))
                for index in range(6)
            ]
            while not (await client.get("/status")).json()["pending_requests"]:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.1)
            await asyncio.to_thread(stack.kill, name, signal_number=signal.SIGKILL)
            is_killed.set()
            stack.start(name)
            await asyncio.gather(*asking)
            await asyncio.to_thread(stack.wait_ready)


async def _ask_until(is_over: asyncio.Event, client: httpx.AsyncClient, seed: int) -> None:
    """Ask again and again, for what no cache has: however late a worker is killed, it works."""
    for salt in itertools.count(0, 1000):
        prompt = prompt_of(PROMPT, VOCAB_SIZE, seed=seed + salt)
        await complete(client, prompt, max_tokens=300, ignore_eos=True)
        if is_over.is_set():
            return


async def work(stack: Stack, *, seed: int) -> None:
    """Ask for what fills the pools, leave early, ask wrongly, and ask for too much."""
    async with httpx.AsyncClient(base_url=stack.url, timeout=120) as client:
        prompts = [prompt_of(PROMPT, VOCAB_SIZE, seed=seed + index) for index in range(12)]
        await asyncio.gather(
            *(complete(client, each, max_tokens=60, ignore_eos=True) for each in prompts)
        )
        short = prompt_of(SHORT, VOCAB_SIZE, seed=seed)
        await asyncio.gather(*(complete(client, each, max_tokens=4) for each in prompts[:6]))
        await complete(client, short, max_tokens=20, ignore_eos=True)
        await stream(client, prompts[0], 60, leave_after=3)
        for body in ({"max_tokens": 100_000}, {"max_tokens": 4, "n": 16}, {"max_tokens": -1}):
            await ask(client, short, **body)
        await asyncio.gather(*(ask(client, short, max_tokens=4, n=8) for _ in range(6)))


async def ask(client: httpx.AsyncClient, prompt: list[int], **body: Any) -> int:
    """Return the status of one request, which may be refused."""
    answer = await client.post("/v1/completions", json={"model": "model", "prompt": prompt} | body)
    return answer.status_code


def families(stack: Stack) -> dict[tuple[str, str], Metric]:
    """Return what router and workers export, by role and name."""
    addresses = {"router": f"{stack.url}/metrics"}
    addresses |= {each["role"]: each["metrics_address"] for each in stack.workers()}
    found: dict[tuple[str, str], Metric] = {}
    for role, address in addresses.items():
        with (
            suppress(ConnectionError),
            urllib.request.urlopen(address, timeout=60) as response,  # noqa: S310 - ours
        ):
            for family in text_string_to_metric_families(response.read().decode()):
                if not family.name.endswith("_created"):
                    found[role, family.name] = family
    return found
