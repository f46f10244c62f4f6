"""A leader with its ranks: prints the followers' process ids as JSON, then waits to be killed."""

import asyncio
import json
import sys
from pathlib import Path

from tests.ranks.worker_ranks import followers, started


async def main() -> None:
    async with started(Path(sys.argv[1])):
        sys.stdout.write(json.dumps([process.pid for process in followers()]) + "\n")
        sys.stdout.flush()
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
