"""A scripted decode worker in a process of its own, so that it can be killed and frozen for real.

Run as ``python -m tests.router.worker_process ROUTER_ADDRESS WORKER_ID KEYS``. It answers each
request with token ids 20, 21, 22, ... up to ``max_tokens``, one each ten milliseconds. A worker
``HALTS`` amid each answer for so long that whoever takes it away finds all of them unfinished.
"""

import asyncio
import json
import sys
from pathlib import Path

from core.channel_keys import DeploymentKeys, KeyPair
from core.messages import Generate
from tests.router.scripted_worker import ScriptedWorker

FIRST_TOKEN_ID = 20
HALTS = "decode-0"
HALTS_AT, HALTS_FOR_S = 40, 5.0


def command(router_address: str, worker_id: str, keys: DeploymentKeys) -> list[str]:
    """Return the command line that starts such a worker."""
    secrets = {party: pair.secret.decode() for party, pair in keys.pairs.items()}
    module = "tests.router.worker_process"
    return [sys.executable, "-m", module, router_address, worker_id, json.dumps(secrets)]


async def count_up(worker: ScriptedWorker, generate: Generate) -> None:
    """Send what is left of the row of token ids, slowly."""
    num_sent = len(generate.output_token_ids)
    for index in range(num_sent, generate.sampling.max_tokens):
        if worker.worker_id == HALTS and index == HALTS_AT:
            await asyncio.sleep(HALTS_FOR_S)
        is_last = index == generate.sampling.max_tokens - 1
        worker.output(generate, (FIRST_TOKEN_ID + index,), finish="length" if is_last else None)
        await asyncio.sleep(0.01)


async def main(router_address: str, worker_id: str, secrets: str) -> None:
    """Serve until killed."""
    pairs = json.loads(secrets).items()
    keys = DeploymentKeys({party: KeyPair.of_secret(key.encode()) for party, key in pairs})
    async with ScriptedWorker(worker_id, router_address, keys, count_up):
        await asyncio.Event().wait()


if __name__ == "__main__":
    sys.path.insert(0, str(Path.cwd()))
    asyncio.run(main(*sys.argv[1:]))
