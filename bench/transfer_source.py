"""A source process of ``bench.transfer``: serves one pool over one transport, as a worker does.

Run as ``python -m bench.transfer_source CONFIG``. It answers one line of JSON, then commands on
standard input: ``spin`` makes progress without pause, for what is measured without a worker around
it; ``serve`` and ``idle`` wait as a worker does; ``usage`` answers the CPU seconds used. The end of
standard input ends the source.
"""

import asyncio
import base64
import json
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import uvloop

from bench.transfer_memory import POOL_NBYTES, SCRATCH_NBYTES, allocate, fill, open_shared
from core.config import TransferConfig
from core.ids import Incarnation
from core.messages import PoolEndpoint
from transfer.pump import Pump
from transfer.transports import open_transport

SOURCE = Incarnation("source")
_ROOT = Path(__file__).parents[1]


class Source:
    """The handle of one source process. Use as a context manager: it ends with the block."""

    def __init__(self, transport: str, options: Mapping[str, str], memory: str) -> None:
        """Start it.

        Args:
            transport: Its name.
            options: UCX settings.
            memory: Path of the shared memory that it fills, for what copies from there.
        """
        config = {"transport": transport, "options": dict(options), "memory": memory}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.transfer_source", json.dumps(config)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=_ROOT,
        )
        fields = json.loads(self._line())
        metadata = base64.b64decode(fields.pop("metadata"))
        self.endpoint = PoolEndpoint(metadata=metadata, **fields)

    def __enter__(self) -> "Source":
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._process.communicate(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()

    def ask(self, command: str) -> str:
        """Return the answer to ``command``."""
        assert self._process.stdin is not None
        self._process.stdin.write(command + "\n")
        self._process.stdin.flush()
        return self._line()

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the source of a measurement ended: {self._process.wait(10)}")
        return line.strip()


async def serve(config: Mapping[str, object]) -> None:
    """Serve until standard input ends."""
    pool = allocate(POOL_NBYTES + SCRATCH_NBYTES)
    fill(pool[:POOL_NBYTES])
    open_shared(str(config["memory"]))[:] = pool[:POOL_NBYTES]
    options = config["options"]
    assert isinstance(options, dict)
    transport = open_transport(str(config["transport"]), SOURCE, ucx_options=options)
    transport.register(pool.ctypes.data, len(pool))
    pump = Pump(transport, interval_s=TransferConfig().pump_interval_s)
    endpoint = transport.endpoint()
    answer(
        json.dumps(
            {
                "transport": endpoint.transport,
                "metadata": base64.b64encode(endpoint.metadata).decode(),
                "base_address": endpoint.base_address,
                "nbytes": endpoint.nbytes,
            }
        )
    )
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    spinning: asyncio.Task[None] | None = None
    while line := (await reader.readline()).decode().strip():
        if spinning is not None:
            spinning.cancel()
            spinning = None
        if line == "spin":
            spinning = asyncio.create_task(spin(transport.progress, transport.poll))
        elif line in {"serve", "idle"}:
            # As a reader says it, where the transport has nothing that wakes its source.
            is_told = transport.wake_descriptor is None
            pump.serve("bench", active=is_told and line == "serve")
        answer(str(time.process_time()) if line == "usage" else line)
    pump.close()
    transport.close()


async def spin(*calls: object) -> None:
    """Call ``calls`` for ever."""
    while True:
        for call in calls:
            assert callable(call)
            call()
        await asyncio.sleep(0)


def answer(text: str) -> None:
    """Write one line to whoever measures."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    uvloop.run(serve(json.loads(sys.argv[1])))
