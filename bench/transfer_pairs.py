"""What takes turns in ``bench.transfer``: of each transport, ours and the library alone."""

import itertools
import statistics
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, Literal, Protocol

import numpy as np

from bench.transfer_direct import Direct, DirectGet, DirectNixl
from bench.transfer_memory import POOL_NBYTES, Bytes, Case
from bench.transfer_ours import Ours
from bench.transfer_source import Source
from core.errors import ConfigError, SluiceError

FAILURES: Final = (SluiceError, RuntimeError, OSError)
"""Of a side: it is missing then, and the others go on."""
_BATCH_S = 0.05
"""Small requests are repeated for so long in each round: one alone is shorter than the noise."""
MAX_BATCH = 64


class Commanded(Protocol):
    """A source, as a side sees it."""

    def ask(self, command: str) -> str:
        """See ``Source.ask``."""
        ...


@dataclass(frozen=True, slots=True)
class Side:
    """Something that reads one case, and what its source does meanwhile."""

    read: Callable[[], float]
    """Reads it once; returns the seconds."""
    source: Commanded | None = None
    """None: nobody takes part."""
    mode: Literal["serve", "spin"] = "serve"

    def sample(self) -> float:
        """Return the median of as many reads as fit into the time of a round, at least one."""
        if self.source is not None:
            self.source.ask(self.mode)
        times: list[float] = []
        while len(times) < MAX_BATCH and sum(times) < _BATCH_S:
            times.append(self.read())
        if self.source is not None:
            self.source.ask("idle")
        return statistics.median(times)


def take_turns(
    sides: Mapping[str, Side], rounds: int, on_failure: Callable[[str, Exception], None]
) -> dict[str, float]:
    """Return each side's median time of one request; those that failed are absent.

    Every round has a sample of every side, so that what else the machine does falls on all alike,
    and only the sides' own source is busy during it. The first round warms up.
    """
    samples: dict[str, list[float]] = {name: [] for name in sides}
    for round_number, name in itertools.product(range(rounds + 1), sides):
        if name not in samples:
            continue
        try:
            sample = sides[name].sample()
        except FAILURES as error:
            del samples[name]
            on_failure(name, error)
            continue
        if round_number:
            samples[name].append(sample)
    return {name: statistics.median(times) for name, times in samples.items()}


def reader(direct: Direct, case: Case) -> Callable[[], float]:
    """Return what reads ``case``, each time elsewhere in the pool, and how long that took."""
    turns = itertools.count()

    def read() -> float:
        rows = case.rows(next(turns))
        began = time.perf_counter()
        direct.read(rows)
        return time.perf_counter() - began

    return read


@dataclass(frozen=True, slots=True)
class Pair:
    """A source process of one transport, and what reads from it."""

    transport: str
    source: Source
    pool: Bytes
    options: Mapping[str, str]
    direct: Direct | None

    def ours(self, block_nbytes: int) -> Ours:
        """Return a new reader of blocks of so many bytes, as a decode worker has it."""
        self.source.ask("serve")
        return Ours(
            self.transport, self.pool, self.source.endpoint, self.options, block_nbytes=block_nbytes
        )

    def sides(self, ours: Ours, case: Case) -> Iterator[tuple[str, Side]]:
        """Yield what reads ``case`` from this source, by name."""
        yield self.transport, Side(lambda: ours.time_of(case), self.source)
        if self.direct is not None:
            yield f"{self.transport} direct", Side(reader(self.direct, case), self.source, "spin")

    def is_right(self, ours: Ours, case: Case) -> bool:
        """Whether the bytes that come are those that were sent."""
        self.pool[:] = 0
        self.source.ask("serve")
        ours.restart()
        ours.time_of(case)
        self.source.ask("idle")
        sent = np.random.default_rng(1).integers(0, 256, POOL_NBYTES, dtype=np.uint8)
        return all(
            (self.pool[local : local + nbytes] == sent[remote : remote + nbytes]).all()
            for local, remote, nbytes in case.rows(0).tolist()
        )


@contextmanager
def open_pair(
    transport: str,
    pool: Bytes,
    options: Mapping[str, str],
    memory: str,
    missing: list[str],
) -> Generator[Pair]:
    """Start a source, which also fills the shared memory at ``memory``.

    Where the library cannot be used alone, that is told in ``missing``.

    Raises:
        SluiceError, RuntimeError, OSError: there is no such source here.
    """
    with Source(transport, options, memory) as source:
        direct: Direct | None = None
        try:
            direct = _open_direct(transport, pool, source, options)
        except SluiceError as error:
            missing.append(f"{transport} direct: {error}")
        try:
            yield Pair(transport, source, pool, options, direct)
        finally:
            if direct is not None:
                direct.close()


def _open_direct(transport: str, pool: Bytes, source: Source, options: Mapping[str, str]) -> Direct:
    if transport != "ucx":
        return DirectNixl(pool, source.endpoint, options)
    if options.get("TLS") == "tcp":
        # UCX emulates it by messages that only a context with one-sided operations answers.
        raise ConfigError("over TCP, sources of ours answer no ucp_get; nixl's do")
    return DirectGet(pool, source.endpoint, options)
