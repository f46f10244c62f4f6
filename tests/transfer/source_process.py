"""A real source: a process that registers a pool, serves it, and can be killed or frozen.

Run as ``python -m tests.transfer.source_process CONFIG``. It prints its endpoint as one line of
JSON, then serves until its standard input closes. ``fill N`` on standard input fills the pool
with pattern N and answers ``filled``; ``usage`` answers the CPU seconds used so far; ``open_files``
how many descriptors are open; ``idle`` stops and ``serve`` starts to make progress.
"""

import base64
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import structs

from core.ids import Incarnation
from core.messages import PoolEndpoint
from transfer.transport import Transport
from transfer.transports import open_transport
from transfer.ucx_wire import decode_address, encode_address

ROOT = Path(__file__).parents[2]
PROGRESS_INTERVAL_S = 0.0005


def pattern(seed: int, nbytes: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


class SourceProcess:
    """The test's handle of one source."""

    def __init__(
        self,
        name: str,
        nbytes: int,
        *,
        ucx_options: Mapping[str, str],
        seed: int = 1,
        transport: str = "nixl",
        is_nameless: bool = False,
    ) -> None:
        """Start it; ``is_nameless``: readers are not told in which process the pool lies."""
        config = {
            "name": name,
            "nbytes": nbytes,
            "ucx_options": dict(ucx_options),
            "seed": seed,
            "transport": transport,
        }
        self.incarnation = Incarnation(name)
        self.seed = seed
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.transfer.source_process", json.dumps(config)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        fields: dict[str, Any] = json.loads(self._line())
        metadata = base64.b64decode(fields.pop("metadata"))
        if is_nameless:
            metadata = encode_address(structs.replace(decode_address(metadata), owner=None))
        self.endpoint = PoolEndpoint(metadata=metadata, **fields)

    def ask(self, command: str) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()
        return self._line()

    def freeze(self) -> None:
        """Stop it; on return it does nothing any more."""
        self.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def wake(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(timeout=10)

    def close(self) -> str:
        """End it, whatever state it is in; return what it wrote to standard error."""
        if self.process.poll() is None:
            self.wake()
        try:
            _, errors = self.process.communicate(timeout=10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            _, errors = self.process.communicate(timeout=10)
        return errors

    def _line(self) -> str:
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], 30)
        assert ready, "the source is silent"
        line = self.process.stdout.readline()
        assert line, f"the source ended: {self.process.poll()}"
        return line.strip()


def main() -> None:
    config = json.loads(sys.argv[1])
    pool = pattern(config["seed"], config["nbytes"])
    transport = open_transport(
        config["transport"], Incarnation(config["name"]), ucx_options=config["ucx_options"]
    )
    transport.register(pool.ctypes.data, pool.nbytes)
    endpoint = transport.endpoint()
    print_line(
        json.dumps(
            {
                "transport": endpoint.transport,
                "metadata": base64.b64encode(endpoint.metadata).decode(),
                "base_address": endpoint.base_address,
                "nbytes": endpoint.nbytes,
            }
        )
    )
    serve(transport, pool)


def serve(transport: Transport, pool: np.ndarray) -> None:
    """Answer commands, and make progress as a worker does: when woken, or else at intervals."""
    is_serving = True
    descriptor = transport.wake_descriptor
    watched: list[Any] = [sys.stdin] if descriptor is None else [sys.stdin, descriptor]
    while True:
        wait_s = PROGRESS_INTERVAL_S if is_serving and descriptor is None else None
        if descriptor is not None and not transport.arm():
            wait_s = 0
        ready, _, _ = select.select(watched, [], [], wait_s)
        if is_serving:
            transport.progress()
            transport.poll()
        if sys.stdin not in ready:
            continue
        match sys.stdin.readline().split():
            case []:
                return
            case ["fill", seed]:
                pool[:] = pattern(int(seed), pool.nbytes)
                print_line("filled")
            case ["usage"]:
                print_line(str(time.process_time()))
            case ["open_files"]:
                print_line(str(len(list(Path("/proc/self/fd").iterdir()))))
            case [("serve" | "idle") as mode]:
                is_serving = mode == "serve"
                print_line(mode)
            case other:
                raise ValueError(other)


def print_line(text: str) -> None:
    os.write(1, (text + "\n").encode())


if __name__ == "__main__":
    main()
