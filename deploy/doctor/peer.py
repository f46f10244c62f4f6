"""One of the two processes between which ``sluice doctor`` moves bytes.

Run as ``python -m deploy.doctor.peer``. Standard input gives the task as a line of JSON. A source
prints its endpoint and serves until its input ends; a reader reads, and prints what it has seen.
Both open the transport as a worker does.
"""

import ctypes
import select
import sys
import time
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from core.errors import SluiceError
from core.ids import Incarnation
from core.messages import PoolEndpoint
from transfer.transport import ExtentRows, MemoryKind, Transport
from transfer.transports import open_transport
from transfer.ucx_devices import find_devices

NUM_PARTS: Final = 256
NUM_READS: Final = 6
READ_TIMEOUT_S: Final = 20.0
INTERVAL_S: Final = 0.0005
"""Between calls of a transport that has nothing to wait on."""
FILL: Final = 0xA5
SOURCE: Final = Incarnation("doctor-source")


class Task(msgspec.Struct, frozen=True):
    """What a process is asked to do."""

    transport: str
    nbytes: int
    ucx_options: dict[str, str]
    memory: MemoryKind = "host"
    endpoint: PoolEndpoint | None = None
    """To read from; None: be the source."""


class Seen(msgspec.Struct, frozen=True):
    """What a reader has seen."""

    transport: str = ""
    version: str = ""
    """Of UCX."""
    path_kind: str = "unknown"
    path: str = ""
    gb_per_s: float = 0.0
    """Of the fastest read."""
    libraries: list[str] = []
    """Files of UCX that are loaded."""
    devices: list[str] = []
    error: str | None = None
    """Why nothing was read."""


def main() -> None:
    """Do what standard input asks for."""
    task = msgspec.json.decode(sys.stdin.buffer.readline(), type=Task)
    try:
        if task.endpoint is None:
            _be_source(task)
        else:
            _print(_read(task, task.endpoint))
    except SluiceError as error:
        _print(Seen(error=str(error), libraries=loaded_libraries()))


def _be_source(task: Task) -> None:
    pool = _Pool(task, FILL)
    transport = open_transport(task.transport, SOURCE, ucx_options=task.ucx_options)
    transport.register(pool.address, task.nbytes, memory=task.memory)
    _print(transport.endpoint())
    while not _has_input(transport):
        transport.progress()


def _has_input(transport: Transport) -> bool:
    """Wait until somebody reads or standard input has ended; return whether that is so."""
    descriptor = transport.wake_descriptor
    if descriptor is None:
        return bool(select.select([sys.stdin], [], [], INTERVAL_S)[0])
    wait_s = None if transport.arm() else 0.0
    return sys.stdin in select.select([sys.stdin, descriptor], [], [], wait_s)[0]


def _read(task: Task, endpoint: PoolEndpoint) -> Seen:
    pool = _Pool(task, 0)
    incarnation = Incarnation("doctor-reader")
    transport = open_transport(task.transport, incarnation, ucx_options=task.ucx_options)
    transport.register(pool.address, task.nbytes, memory=task.memory)
    transport.connect(SOURCE, endpoint)
    durations = [_time_read(transport, _extents(task.nbytes)) for _ in range(NUM_READS)]
    path = transport.path(SOURCE)
    if not pool.holds(FILL):
        raise SluiceError("the read is over, and the bytes are not those of the source")
    libraries = loaded_libraries()
    return Seen(
        transport=transport.name,
        version=_version_of(libraries),
        path_kind=path.kind,
        path=path.description,
        gb_per_s=task.nbytes / min(durations) / 1e9,
        libraries=libraries,
        devices=list(find_devices(task.ucx_options)),
    )


def _extents(nbytes: int) -> ExtentRows:
    """Return the whole pool in parts."""
    size = nbytes // NUM_PARTS
    offsets = np.arange(NUM_PARTS, dtype=np.int64) * size
    return np.stack([offsets, offsets, np.full(NUM_PARTS, size, dtype=np.int64)], axis=1)


def _time_read(transport: Transport, extents: ExtentRows) -> float:
    """Read once and return how long it took.

    Raises:
        SluiceError: it failed, or has no end.
    """
    began_at = time.monotonic()
    transport.read(SOURCE, extents)
    while not (outcomes := transport.poll()):
        if time.monotonic() > began_at + READ_TIMEOUT_S:
            raise SluiceError(f"a read is not over after {READ_TIMEOUT_S:g} s")
        _wait(transport)
    if outcomes[0].failure is not None:
        raise SluiceError(f"a read failed: {outcomes[0].failure}")
    return time.monotonic() - began_at


def _wait(transport: Transport) -> None:
    descriptor = transport.wake_descriptor
    if descriptor is None:
        select.select([], [], [], INTERVAL_S)
    elif transport.arm():
        select.select([descriptor], [], [], READ_TIMEOUT_S)


class _Pool:
    """Memory of either kind, filled with one value."""

    def __init__(self, task: Task, fill: int) -> None:
        self._memory: Any
        if task.memory == "host":
            self._memory = np.full(task.nbytes, fill, dtype=np.uint8)
            self.address: int = self._memory.ctypes.data
        else:
            import torch  # noqa: PLC0415 - takes seconds to load, and is for GPUs only

            self._memory = torch.full((task.nbytes,), fill, dtype=torch.uint8, device="cuda")
            torch.cuda.synchronize()
            self.address = self._memory.data_ptr()

    def holds(self, fill: int) -> bool:
        """Whether every byte is ``fill``."""
        return bool((self._memory == fill).all())


def loaded_libraries() -> list[str]:
    """Return the files of UCX that this process has loaded."""
    maps = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    files = {line.split(maxsplit=5)[5] for line in maps if "/libuc" in line}
    return sorted(file for file in files if Path(file).name.startswith(("libucp", "libuct")))


def _version_of(libraries: list[str]) -> str:
    """Return the version of the loaded library: a file that is loaded is not loaded anew."""
    for file in libraries:
        if Path(file).name.startswith("libucp"):
            function = ctypes.CDLL(file).ucp_get_version_string
            function.restype = ctypes.c_char_p
            return bytes(function()).decode()
    return "unknown"


def _print(message: Seen | PoolEndpoint) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(message) + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
