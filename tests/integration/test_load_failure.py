"""KV that does not come costs time, and no answer: computed where it is, or tried elsewhere.

Under either policy a client sees 200 with the right text; what differs is who does the work, and
that it is counted.
"""

import asyncio
import re
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.integration.models import VOCAB_SIZE, tiny_model
from tests.integration.requests import complete, generate_reference, prompt_of
from tests.integration.stack import ANSWER_TIMEOUT_S, Stack

pytestmark = [pytest.mark.ucx, pytest.mark.timeout(300)]

NUM_REQUESTS, NUM_TOKENS = 16, 8


async def until_asked(client: httpx.AsyncClient, name: str) -> None:
    """Return once decode has asked prefill for the KV of the request."""
    async with asyncio.timeout(ANSWER_TIMEOUT_S):
        while True:
            found = (await client.get(f"/v1/trace/{name}")).json()
            events = [e["event"] for p in found.get("processes", ()) for e in p["events"]]
            if "prefill_asked" in events:
                return


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_c23_c20_killed_prefill_worker_under_each_policy(tmp_path: Path, policy: str) -> None:
    model_path = tiny_model("llama", tmp_path)
    prompts = [prompt_of(300 + 20 * n, VOCAB_SIZE, seed=n) for n in range(NUM_REQUESTS)]
    expected = generate_reference(model_path, prompts, num_tokens=NUM_TOKENS)

    async def under_kill(stack: Stack) -> list[dict[str, Any]]:
        body = {"max_tokens": NUM_TOKENS, "ignore_eos": True, "return_token_ids": True}
        async with httpx.AsyncClient(base_url=stack.url, timeout=120) as client:
            *early, late = (
                complete(client, prompt, name=f"{policy}-{n}", **body)
                for n, prompt in enumerate(prompts)
            )
            tasks = [asyncio.create_task(each) for each in early]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            # It stands still at first: however late it is killed, one waits for certain.
            stack.kill("prefill-0", signal_number=signal.SIGSTOP)
            tasks.append(asyncio.create_task(late))
            await until_asked(client, f"{policy}-{NUM_REQUESTS - 1}")
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
