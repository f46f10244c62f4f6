"""What a peer can do to a reader, or a reader to its source, at the worst moment.

A frozen process that wakes up late is the hardest: it goes on with what it was asked before the
other side gave it up. Its bytes must land nowhere, and meeting an ended peer must not kill it.
"""

import base64
import json
import random
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from core.errors import InternalError, PeerLostError, TransferError
from core.ids import ReadId
from tests.transfer.conftest import MakeSource
from tests.transfer.source_process import ROOT, SourceProcess, pattern
from tests.transfer.transport_cases import (
    BLOCK,
    BOUND_S,
    CANARY,
    CASES,
    NBYTES,
    NUM_BLOCKS,
    WHOLE,
    Case,
    Side,
)
from transfer.transport import Extent

pytestmark = [pytest.mark.ucx, pytest.mark.timeout(120)]

NUM_READS = 6
"""More bytes than the buffers of a connection take: some reads have to wait for the source."""


def before_connect(_: Side, __: SourceProcess) -> list[ReadId]:
    return []


def connected(side: Side, source: SourceProcess) -> list[ReadId]:
    side.connect(source)
    return []


def posted(side: Side, source: SourceProcess) -> list[ReadId]:
    side.connect(source)
    return [side.transport.read(source.incarnation, WHOLE) for _ in range(NUM_READS)]


def half_landed(side: Side, source: SourceProcess) -> list[ReadId]:
    """Return with some bytes here, and some not."""
    reads = posted(side, source)
    for _ in range(100_000):
        ended = {outcome.read for outcome in side.transport.poll()}
        reads = [read for read in reads if read not in ended]
        if side.pool.any():
            break
        side.pause(0.01)
    assert side.pool.any()
    return reads


def landed(side: Side, source: SourceProcess) -> list[ReadId]:
    side.connect(source)
    assert side.read(source, WHOLE).is_complete
    return []


Stage = Callable[[Side, SourceProcess], list[ReadId]]
STAGES: tuple[Stage, ...] = (before_connect, connected, posted, half_landed, landed)


@pytest.fixture(params=STAGES, ids=lambda stage: stage.__name__)
def stage(request: pytest.FixtureRequest) -> Stage:
    return request.param


def test_a_source_frozen_at_any_point_wakes_up_to_no_harm(
    source: SourceProcess, side: Side, case: Case, stage: Stage
) -> None:
    reads = stage(side, source)
    source.freeze()
    if stage is before_connect:
        reads = posted(side, source)
    reported = [outcome.read for outcome in side.transport.poll()]
    try:
        torn_down = side.transport.tear_down(source.incarnation)
    except InternalError:
        assert case.tear_down_may_fail
        return
    assert sorted(reported + torn_down) == sorted(reads), "each read ends exactly once"
    side.pool[:] = CANARY
    source.wake()
    side.expect_silence(0.3)
    if has_survived(source, case):
        side.connect(source)
        assert side.read(source, WHOLE).is_complete
        assert (side.pool == pattern(1, NBYTES)).all()


def test_reads_posted_to_a_frozen_source_end_well_when_it_wakes_up(
    source: SourceProcess, side: Side, case: Case
) -> None:
    source.freeze()
    reads = posted(side, source)
    early = side.transport.poll()
    if not case.is_one_sided:
        select.select([], [], [], 0.05)
        early += side.transport.poll()
        assert len(early) < len(reads), "a source that is frozen sends nothing"
    source.wake()
    outcomes = [*early, *side.outcomes(len(reads) - len(early))]
    assert sorted(outcome.read for outcome in outcomes) == reads
    assert all(outcome.is_complete for outcome in outcomes)
    assert (side.pool == pattern(1, NBYTES)).all()


def test_a_source_killed_at_any_point_ends_its_reads_in_bounded_time(
    source: SourceProcess, side: Side, stage: Stage
) -> None:
    reads = stage(side, source)
    source.kill()
    if not side.transport.is_connected(source.incarnation):
        side.transport.poll()
    else:
        try:
            reads.append(side.transport.read(source.incarnation, WHOLE))
        except PeerLostError:
            assert not side.transport.is_connected(source.incarnation)
    outcomes = side.outcomes(len(reads))
    assert sorted(outcome.read for outcome in outcomes) == reads
    side.expect_silence(0.05)
    assert fails_or_refuses(side, source)


def fails_or_refuses(side: Side, source: SourceProcess) -> bool:
    """Whether a new connection to a dead source is an error, at some point before bytes come."""
    try:
        side.connect(source)
        return not side.read(source, WHOLE).is_complete
    except TransferError:
        return True


def test_canaries_around_every_extent_stay(source: SourceProcess, side: Side) -> None:
    side.connect(source)
    rng = random.Random(5)
    want = np.full(NBYTES, CANARY, dtype=np.uint8)
    theirs = pattern(1, NBYTES)
    for _ in range(20):
        side.pool[:] = want[:] = CANARY
        extents = []
        for at in rng.sample(range(NUM_BLOCKS), 40):
            nbytes, gap = rng.randint(1, BLOCK - 64), rng.randint(1, 32)
            extents.append(Extent(at * BLOCK + gap, rng.randint(0, NBYTES - nbytes), nbytes))
        for extent in extents:
            want[extent.local_offset : extent.local_offset + extent.nbytes] = theirs[
                extent.remote_offset : extent.remote_offset + extent.nbytes
            ]
        assert side.read(source, extents).is_complete
        assert (side.pool == want).all()


def test_many_peers_go_on_while_one_is_torn_down_again_and_again(
    make_source: MakeSource, side: Side, case: Case
) -> None:
    sources = [make_source(f"s{seed}", seed) for seed in (1, 2, 3)]
    for source in sources:
        side.connect(source)
        assert side.read(source, WHOLE[:1]).is_complete
    quarter = NUM_BLOCKS // 4
    for _ in range(2 if case.source_dies_with_readers else 8):
        frozen, *healthy = sources
        frozen.freeze()
        lost = side.transport.read(frozen.incarnation, WHOLE[:quarter])
        good = {
            side.transport.read(source.incarnation, WHOLE[quarter * at : quarter * (at + 1)])
            for at, source in enumerate(healthy, start=1)
        }
        early = side.transport.poll()
        torn_down = side.transport.tear_down(frozen.incarnation)
        done = [*early, *side.outcomes(len(good) + 1 - len(torn_down) - len(early))]
        assert {outcome.read for outcome in done if outcome.is_complete} >= good
        assert {outcome.read for outcome in done} | set(torn_down) == good | {lost}
        for at, source in enumerate(healthy, start=1):
            part = slice(quarter * at * BLOCK, quarter * (at + 1) * BLOCK)
            assert (side.pool[part] == pattern(source.seed, NBYTES)[part]).all()
        frozen.wake()
        if case.source_dies_with_readers:
            break
        side.connect(frozen)
        assert side.read(frozen, WHOLE[:quarter]).is_complete
        sources = [*healthy, frozen]


class DoomedReader:
    """A reader in a process of its own that reads all the time."""

    def __init__(self, source: SourceProcess, case: Case) -> None:
        config = {
            "transport": case.transport,
            "metadata": base64.b64encode(source.endpoint.metadata).decode(),
            "base_address": source.endpoint.base_address,
            "nbytes": source.endpoint.nbytes,
            "ucx_options": dict(case.options),
            "num_blocks": NUM_BLOCKS,
        }
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.transfer.reader_process", json.dumps(config)],
            stdout=subprocess.PIPE,
            cwd=ROOT,
        )
        self.expect_reads(3)

    def expect_reads(self, count: int) -> None:
        stdout = self.process.stdout
        assert stdout is not None
        for _ in range(count):
            assert select.select([stdout], [], [], BOUND_S)[0], "the reader is stuck"
            assert stdout.readline() == b"reading\n"

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate(timeout=10)


@pytest.fixture
def make_reader(source: SourceProcess, case: Case) -> Iterator[Callable[[], DoomedReader]]:
    made: list[DoomedReader] = []

    def make() -> DoomedReader:
        made.append(DoomedReader(source, case))
        return made[-1]

    yield make
    for reader in made:
        reader.kill()


def test_a_source_outlives_readers_that_are_killed_in_mid_read(
    source: SourceProcess, side: Side, case: Case, make_reader: Callable[[], DoomedReader]
) -> None:
    for _ in range(1 if case.source_dies_with_readers else 4):
        make_reader().kill()
    if has_survived(source, case):
        side.connect(source)
        assert side.read(source, WHOLE).is_complete
        assert (side.pool == pattern(1, NBYTES)).all()


def test_a_frozen_reader_holds_up_nobody(
    source: SourceProcess, side: Side, case: Case, make_reader: Callable[[], DoomedReader]
) -> None:
    reader = make_reader()
    reader.process.send_signal(signal.SIGSTOP)
    side.connect(source)
    for _ in range(5):
        assert side.read(source, WHOLE).is_complete
    reader.process.send_signal(signal.SIGCONT)
    reader.expect_reads(3)
    reader.kill()
    assert has_survived(source, case) or case.source_dies_with_readers


@pytest.mark.slow
def test_connecting_and_tearing_down_leaks_nothing(source: SourceProcess, side: Side) -> None:
    def cycle() -> None:
        side.connect(source)
        assert side.read(source, WHOLE[:4]).is_complete
        side.transport.tear_down(source.incarnation)

    for _ in range(20):
        cycle()
    before = (*files_and_memory(), int(source.ask("open_files")))
    for _ in range(200):
        cycle()
    files, nbytes = files_and_memory()
    assert files <= before[0] + 2
    assert nbytes < before[1] + 32 * 2**20
    deadline = time.monotonic() + BOUND_S
    while int(source.ask("open_files")) > before[2] + 2:
        assert time.monotonic() < deadline, "the source keeps what its readers have left"
        select.select([], [], [], 0.02)


def files_and_memory() -> tuple[int, int]:
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * 4096
    return len(list(Path("/proc/self/fd").iterdir())), resident


def has_survived(source: SourceProcess, case: Case) -> bool:
    """Whether the source must work now: it may have died if that is a stated limit of the case."""
    status = source.process.poll()
    if not case.source_dies_with_readers:
        assert status is None, f"the source has died: {status}"
        return True
    assert status in {None, -signal.SIGABRT, -signal.SIGSEGV}, "an end inside UCX is what is known"
    return False


def test_the_first_choice_has_no_limit() -> None:
    assert not any(case.source_dies_with_readers for case in CASES if case.transport == "ucx")
