"""Moves bytes between two processes, as two workers would."""

import os
import select
import subprocess
import sys
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Final

import msgspec

from core.messages import PoolEndpoint
from deploy.doctor.peer import Seen, Task
from transfer.transport import MemoryKind

NBYTES: Final = 64 * 2**20
TIMEOUT_S: Final = 60.0
END_TIMEOUT_S: Final = 5.0


def probe(transport: str, *, ucx_options: Mapping[str, str], memory: MemoryKind = "host") -> Seen:
    """Return what a reader sees of a source, both started here; never raises for them.

    Bounded: whatever happens, both have ended within ``TIMEOUT_S`` and a bit.
    """
    task = Task(transport, NBYTES, dict(ucx_options), memory)
    with offering(task) as offered:
        return offered if isinstance(offered, Seen) else read_from(offered, task)


@contextmanager
def offering(task: Task) -> Generator[PoolEndpoint | Seen]:
    """A source for readers anywhere, or why there is none."""
    with _peer(task) as source:
        answer = _line_of(source)
        try:
            offered = msgspec.json.decode(answer, type=PoolEndpoint)
        except msgspec.DecodeError:
            offered = _failure("source", source, answer)
        yield offered


def read_from(endpoint: PoolEndpoint, task: Task) -> Seen:
    """Return what a reader, started here, sees of the source at ``endpoint``; as ``probe``."""
    with _peer(msgspec.structs.replace(task, endpoint=endpoint)) as reader:
        answer = _line_of(reader)
        try:
            return msgspec.json.decode(answer, type=Seen)
        except msgspec.DecodeError:
            return _failure("reader", reader, answer)


@contextmanager
def _peer(task: Task) -> Generator["subprocess.Popen[bytes]"]:
    """A process that carries ``task`` out; it is gone at the end, whatever it does."""
    path = os.pathsep.join(filter(None, [os.getcwd(), *sys.path]))  # noqa: PTH109 - a string
    process = subprocess.Popen(
        [sys.executable, "-m", "deploy.doctor.peer"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": path},
    )
    assert process.stdin is not None, "it was asked for"
    try:
        process.stdin.write(msgspec.json.encode(task) + b"\n")
        process.stdin.flush()
        yield process
    except BrokenPipeError:
        yield process
    finally:
        _end(process)


def _end(process: "subprocess.Popen[bytes]") -> None:
    try:
        process.communicate(timeout=END_TIMEOUT_S)
    except (subprocess.TimeoutExpired, ValueError, BrokenPipeError):
        process.kill()
        process.wait()


def _line_of(process: "subprocess.Popen[bytes]") -> bytes:
    """Return the next line that ``process`` prints; b"" where none comes."""
    assert process.stdout is not None, "it was asked for"
    ready, _, _ = select.select([process.stdout], [], [], TIMEOUT_S)
    return process.stdout.readline() if ready else b""


def _failure(which: str, process: "subprocess.Popen[bytes]", answer: bytes) -> Seen:
    """Return what is known of a process that did not answer as it should."""
    try:
        return msgspec.json.decode(answer, type=Seen)
    except msgspec.DecodeError:
        pass
    how = "says something else" if answer else _end_or_silence(process)
    process.kill()
    _, errors = process.communicate()
    lines = errors.decode(errors="replace").strip().splitlines()
    return Seen(error=f"the {which} {how}{f': {lines[-1]}' if lines else ''}")


def _end_or_silence(process: "subprocess.Popen[bytes]") -> str:
    try:
        return f"ended with exit code {process.wait(END_TIMEOUT_S)}"
    except subprocess.TimeoutExpired:
        return f"said nothing for {TIMEOUT_S:g} s"
