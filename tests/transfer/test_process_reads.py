"""A copy out of another process's memory: of that process, all of it, and never after its end.

The kernel gives the numbers of processes away again. Without a look at who it was, a read of a
source that has ended brings another process's memory as KV.
"""

import mmap
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from core.ids import Incarnation, ReadId
from tests.transfer.source_process import SourceProcess
from transfer import process_reads
from transfer.descriptors import Pool, describe
from transfer.memory_owners import MemoryOwner, started_at, this_process
from transfer.process_reads import (
    MAX_CALL_EXTENTS,
    MAX_CALL_NBYTES,
    ProcessReads,
    SourceMemoryError,
    open_process_reads,
)
from transfer.transport import Extent, rows_of
from transfer.ucx_bindings import Ucp
from transfer.ucx_library import load_ucx
from transfer.ucx_reads import OneSidedReads
from transfer.ucx_transport import UcxTransport
from transfer.ucx_worker import UcxContext, UcxWorker

pytestmark = [pytest.mark.ucx]

PAGE = mmap.PAGESIZE
NUM_PAGES = 3 * MAX_CALL_EXTENTS
NBYTES = NUM_PAGES * PAGE


@pytest.fixture
def worker() -> Iterator[UcxWorker]:
    context = UcxContext(Ucp(load_ucx()), {"TLS": "tcp"})
    worker = context.open_worker()
    worker.progress(limit_s=0)
    yield worker
    context.close()


class Sides:
    """Both pools are in this process: a process may copy out of itself."""

    def __init__(self, worker: UcxWorker) -> None:
        self.target = np.zeros(NBYTES, dtype=np.uint8)
        self.memory = mmap.mmap(-1, NBYTES)
        self.source = np.frombuffer(self.memory, dtype=np.uint8)
        self.source[:] = np.random.default_rng(1).integers(0, 256, NBYTES, dtype=np.uint8)
        self.worker = worker
        self.mine, self.theirs = (
            Pool(side.ctypes.data, NBYTES) for side in (self.target, self.source)
        )
        owner = this_process()
        assert owner is not None
        self.reads = ProcessReads(worker, owner, self.theirs)

    def post(self, number: int, extents: list[Extent]) -> ReadId:
        self.reads.post(ReadId(number), describe(extents, self.mine, self.theirs))
        return ReadId(number)


@pytest.fixture
def sides(worker: UcxWorker) -> Iterator[Sides]:
    sides = Sides(worker)
    yield sides
    sides.reads.release()


@pytest.fixture
def child() -> Iterator["subprocess.Popen[bytes]"]:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield child
    child.kill()
    child.communicate()


def owner_of(child: "subprocess.Popen[bytes]") -> MemoryOwner:
    mine = this_process()
    assert mine is not None
    return structs.replace(mine, pid=child.pid, started_at=started_at(child.pid))


def address_in(child: "subprocess.Popen[bytes]") -> int:
    """Return where something that can be read lies in it."""
    maps = Path(f"/proc/{child.pid}/maps").read_text().splitlines()
    return next(int(line.split("-")[0], 16) for line in maps if line.split()[1].startswith("r"))


def scattered(count: int) -> list[Extent]:
    order = np.random.default_rng(2).permutation(NUM_PAGES)[:count].tolist()
    return [Extent(at * PAGE, of * PAGE, PAGE) for at, of in enumerate(order)]


def test_more_extents_than_one_call_takes_all_land(sides: Sides) -> None:
    extents = scattered(NUM_PAGES)
    read = sides.post(1, extents)
    landed: list[ReadId] = []
    while not landed:
        landed = sides.reads.take_landed()
    assert landed == [read]
    assert sides.reads.pending() == []
    for local, remote, nbytes in extents:
        same = sides.target[local : local + nbytes] == sides.source[remote : remote + nbytes]
        assert same.all()


def test_nothing_is_copied_before_it_is_asked_for_and_nothing_after_release(
    worker: UcxWorker,
) -> None:
    sides = Sides(worker)
    sides.post(1, scattered(8))
    sides.reads.release()
    assert not sides.target.any()
    assert sides.reads.take_landed() == []
    assert not sides.target.any()


def test_a_turn_ends_and_the_rest_needs_no_event(
    sides: Sides, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reader would otherwise sleep on its descriptor with half a read posted."""
    monkeypatch.setattr(process_reads, "_TURN_S", 0.0)
    first = sides.post(1, scattered(NUM_PAGES // 2))
    second = sides.post(2, scattered(8))
    turns: list[list[ReadId]] = []
    while sides.reads.pending():
        sides.worker.progress(limit_s=60)  # until UCX itself has nothing to do
        turns.append(sides.reads.take_landed())
        assert sides.worker.needs_progress == bool(sides.reads.pending())
    assert turns == [[]] * (len(turns) - 2) + [[first], [second]]
    assert len(turns) > 2


def test_memory_that_is_there_no_more_fails_the_read(sides: Sides) -> None:
    """It may begin in the middle of a read: a short copy is not a copy."""
    file = os.memfd_create("pool")
    os.ftruncate(file, 2 * PAGE)
    memory = mmap.mmap(file, 2 * PAGE)
    os.ftruncate(file, PAGE)
    os.close(file)
    pool = Pool(np.frombuffer(memory, dtype=np.uint8).ctypes.data, 2 * PAGE)
    half, gone = [Extent(0, 0, PAGE), Extent(PAGE, PAGE, PAGE)], [Extent(0, PAGE, PAGE)]
    for extents, reason in ((half, f"only {PAGE} of {2 * PAGE}"), (gone, "Bad address")):
        sides.reads.post(ReadId(1), describe(extents, sides.mine, pool))
        with pytest.raises(SourceMemoryError, match=reason):
            sides.reads.take_landed()
        assert sides.reads.pending() == [ReadId(1)]


def test_another_process_of_the_same_number_is_not_read(
    worker: UcxWorker, child: "subprocess.Popen[bytes]"
) -> None:
    byte = np.zeros(1, dtype=np.uint8)
    mine = this_process()
    assert mine is not None
    source = Pool(byte.ctypes.data, 1)
    assert open_process_reads(worker, structs.replace(mine, started_at=0), source) is None
    assert open_process_reads(worker, structs.replace(mine, pid_namespace=0), source) is None
    assert open_process_reads(worker, None, source) is None
    child.kill()
    ended = owner_of(child)
    child.wait()
    assert open_process_reads(worker, ended, source) is None


def test_bytes_of_a_number_that_was_given_away_do_not_count(
    sides: Sides, worker: UcxWorker, child: "subprocess.Popen[bytes]"
) -> None:
    """The copy works, out of whoever has the number now; that it was the source is not so."""
    reads = ProcessReads(worker, owner_of(child), Pool(address_in(child), 1))
    child.kill()
    child.wait()
    reads._pid = os.getpid()
    reads.post(ReadId(1), describe([Extent(0, 0, PAGE)], sides.mine, sides.theirs))
    with pytest.raises(SourceMemoryError, match="has ended"):
        reads.take_landed()
    reads.release()


def test_what_may_not_be_read_is_left_to_ucx(
    worker: UcxWorker, child: "subprocess.Popen[bytes]"
) -> None:
    assert open_process_reads(worker, owner_of(child), Pool(PAGE, PAGE)) is None


@pytest.mark.parametrize(("is_nameless", "way"), [(False, ProcessReads), (True, OneSidedReads)])
def test_a_source_that_names_its_process_is_read_by_calls_and_another_by_gets(
    *, is_nameless: bool, way: type
) -> None:
    """The conformance suite runs both, and would pass where one of them is never taken."""
    source = SourceProcess("s", NBYTES, ucx_options={}, transport="ucx", is_nameless=is_nameless)
    target = np.zeros(NBYTES, dtype=np.uint8)
    reader = UcxTransport(Incarnation("reader"))
    reader.register(target.ctypes.data, NBYTES)
    reader.connect(source.incarnation, source.endpoint)
    assert type(reader._peers[source.incarnation].reads) is way
    reader.close()
    source.close()


@given(st.lists(st.integers(1, MAX_CALL_NBYTES), min_size=1, max_size=50))
def test_calls_cover_all_extents_once_within_their_limits(sizes: list[int]) -> None:
    rows = rows_of([Extent(0, 0, size) for size in sizes])
    calls = list(process_reads._calls(rows))
    assert [at for first, count, _ in calls for at in range(first, first + count)] == list(
        range(len(sizes))
    )
    for first, count, nbytes in calls:
        assert nbytes == sum(sizes[first : first + count]) <= MAX_CALL_NBYTES
        assert 0 < count <= MAX_CALL_EXTENTS
