"""Which transport over which path the conformance suite runs, and what each cannot do.

A limit is stated here, with its reason, and nowhere else: a test asks for it by name.
"""

import select
import time
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec

import numpy as np

from core.ids import Incarnation
from tests.transfer.source_process import SourceProcess
from transfer.transport import Extent, ReadOutcome, Transport
from transfer.transports import open_transport

NUM_BLOCKS = 256
BLOCK = 64 * 1024
NBYTES = NUM_BLOCKS * BLOCK
WHOLE = [Extent(at, at, BLOCK) for at in range(0, NBYTES, BLOCK)]
CANARY = 0x5A
BOUND_S = 60.0
"""A guard against hanging: UCX itself looks after its peers each 20 s."""


@dataclass(frozen=True)
class Case:
    """One transport over one path."""

    transport: str
    path: str
    source_dies_with_readers: str = ""
    """Why a source may die when a reader goes away in mid-read; empty: it never does."""
    tear_down_may_fail: str = ""
    """Why a tear-down of a frozen source may raise, having proven nothing; empty: never."""
    is_nameless: bool = False
    """Whether the source's process is not told, so that UCX copies each extent by itself."""

    @property
    def options(self) -> Mapping[str, str]:
        return {"TLS": "tcp"} if self.path == "tcp" else {}

    @property
    def is_one_sided(self) -> bool:
        """Whether the source takes no part in a read: freezing it changes nothing."""
        return self.path == "shared_memory"

    def __str__(self) -> str:
        return f"{self.transport}-{self.path}" + "-by-gets" * self.is_nameless


CASES = (
    Case("ucx", "shared_memory"),
    Case("ucx", "shared_memory", is_nameless=True),
    Case("ucx", "tcp"),
    Case("nixl", "shared_memory"),
    Case(
        "nixl",
        "tcp",
        source_dies_with_readers=(
            "UCX emulates reads over TCP, and aborts or crashes when it answers a reader that is "
            "gone ('unexpected error: Endpoint timeout')"
        ),
    ),
)

if find_spec("ucxx") is not None:
    # Its endpoints use TCP on one host too: see ``transfer.ucxx_transport``.
    CASES = (
        *CASES,
        Case(
            "ucxx",
            "tcp",
            tear_down_may_fail=(
                "requests that wait for a connection, or have half landed, keep their worker, and "
                "cannot always be cancelled"
            ),
        ),
    )


class Side:
    """The reading side of a test."""

    def __init__(self, case: Case, name: str = "reader") -> None:
        self.pool = np.zeros(NBYTES, dtype=np.uint8)
        self.transport: Transport = open_transport(
            case.transport, Incarnation(name), ucx_options=case.options
        )
        self.transport.register(self.pool.ctypes.data, NBYTES)

    def connect(self, source: SourceProcess) -> Incarnation:
        self.transport.connect(source.incarnation, source.endpoint)
        return source.incarnation

    def pause(self, at_most_s: float) -> None:
        """Wait as a worker does: to be woken, or else for a moment."""
        descriptor = self.transport.wake_descriptor
        if descriptor is None:
            select.select([], [], [], min(at_most_s, 0.0005))
        elif self.transport.arm():
            select.select([descriptor], [], [], at_most_s)

    def outcomes(self, count: int = 1, *, within_s: float = BOUND_S) -> list[ReadOutcome]:
        """Return at least ``count`` outcomes, or fail."""
        found = self.transport.poll()
        deadline = time.monotonic() + within_s
        while len(found) < count:
            left_s = deadline - time.monotonic()
            assert left_s > 0, "a read is not terminal in time"
            self.pause(left_s)
            found += self.transport.poll()
        return found

    def read(self, source: SourceProcess, extents: list[Extent]) -> ReadOutcome:
        read = self.transport.read(source.incarnation, extents)
        (outcome,) = self.outcomes()
        assert outcome.read == read
        return outcome

    def expect_silence(self, for_s: float) -> None:
        """Nothing is reported and not one byte lands, however often it is looked."""
        self.pool[:] = CANARY
        deadline = time.monotonic() + for_s
        while (left_s := deadline - time.monotonic()) > 0:
            assert self.transport.poll() == []
            self.pause(min(left_s, 0.01))
        assert (self.pool == CANARY).all(), "a byte landed after the end of its read"
