"""KV that does not come costs time, and no answer: computed where it is, or tried elsewhere.

Under either policy a client sees 200 with the right text; what differs is who does the work, and
that it is counted.
"""

import asyncio
import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.integration.models import VOCAB_SIZE, tiny_model
from tests.integration.requests import complete, generate_reference, prompt_of
from tests.integration.stack import Stack

pytestmark = [pytest.mark.ucx, pytest.mark.timeout(300)]

NUM_REQUESTS, NUM_TOKENS = 16, 8


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_c23_c20_killed_prefill_worker_under_each_policy(tmp_path: Path, policy: str) -> None:
    model_path = tiny_model("llama", tmp_path)
    prompts = [prompt_of(300 + 20 * n, VOCAB_SIZE, seed=n) for n in range(NUM_REQUESTS)]
    expected = generate_reference(model_path, prompts, num_tokens=NUM_TOKENS)

    async def under_kill(stack: Stack) -> list[dict[str, Any]]:
        body = {"max_tokens": NUM_TOKENS, "ignore_eos": True, "return_token_ids": True}
        async with httpx.AsyncClient(base_url=stack.url, timeout=120) as client:
            tasks = [asyncio.create_task(complete(client, prompt, **body)) for prompt in prompts]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            stack.kill("prefill-0")
            return await asyncio.gather(*tasks)

    # Given requests of which some wait for their KV
    with Stack.open(
        model_path,
        model={"dtype": "float32"},
        cache={"memory_gib": 0.05, "poison": True},
        transfer={"load_failure": policy},
        scheduler={"max_batch_tokens": 64},
    ) as stack:
        # When their prefill worker is killed
        answers = asyncio.run(under_kill(stack))
        # Then each is answered as if nothing had happened
        assert [answer["choices"][0]["token_ids"] for answer in answers] == expected
        # By this worker at the first attempt, or by an attempt of the router's
        samples = stack.metrics("decode-0")
        name = 'sluice_kv_load_failures_total{{policy="{}"}}'
        other = {"recompute": "fail", "fail": "recompute"}[policy]
        assert samples[name.format(policy)] > 0
        assert samples[name.format(other)] == 0
        _, text = stack.get("/metrics")
        retries = re.findall(r"^sluice_retries_total\{.*\} (\S+)$", text, re.MULTILINE)
        assert (sum(map(float, retries)) > 0) == (policy == "fail")
        # And the answer says so
        recomputed = [answer["sluice"] for answer in answers if answer["sluice"]["recomputed"]]
        assert len(recomputed) == samples[name.format("recompute")]
        assert {stats["path"] for stats in recomputed} <= {"local"}
        stack.wait_idle("decode-0")
