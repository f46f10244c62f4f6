"""What every ``Transport`` must keep between real processes, and does on this machine.

The failures guarded are the worst that this layer can have: a byte that lands after the transport
said that none will, a read that never ends, a source that dies with its reader, a spinning core.
"""

import random
import select
import time

import numpy as np
import pytest

from core.errors import ConfigError, PeerLostError, TransferError
from core.ids import Incarnation, ReadId
from core.messages import PoolEndpoint
from tests.transfer.conftest import MakeSource
from tests.transfer.source_process import SourceProcess, pattern
from tests.transfer.transport_cases import BLOCK, NBYTES, NUM_BLOCKS, WHOLE, Case, Side
from transfer.transport import Extent

pytestmark = [pytest.mark.ucx, pytest.mark.timeout(120)]

IDLE_S = 0.5


def shuffled(seed: int, count: int = NUM_BLOCKS) -> list[Extent]:
    rng = random.Random(seed)
    remote = rng.sample(range(NUM_BLOCKS), count)
    local = rng.sample(range(NUM_BLOCKS), count)
    return [Extent(a * BLOCK, b * BLOCK, BLOCK) for a, b in zip(local, remote, strict=True)]


def test_bytes_arrive_exactly_and_nothing_else_changes(source: SourceProcess, side: Side) -> None:
    side.connect(source)
    want = np.full(NBYTES, 0xA5, dtype=np.uint8)
    side.pool[:] = want
    theirs = pattern(1, NBYTES)
    extents = [*shuffled(3, 100)[:-1], Extent(200 * BLOCK + 3, 7, 5)]
    taken = {extent.local_offset // BLOCK for extent in extents[:-1]}
    if 200 in taken:
        extents = extents[:-1]
    for extent in extents:
        want[extent.local_offset : extent.local_offset + extent.nbytes] = theirs[
            extent.remote_offset : extent.remote_offset + extent.nbytes
        ]
    assert side.read(source, extents).is_complete
    assert (side.pool == want).all()


def test_many_descriptors_and_reads_each_end_once(source: SourceProcess, side: Side) -> None:
    side.connect(source)
    reads = [
        side.transport.read(source.incarnation, [Extent(at, at, 512)])
        for at in range(0, 200 * 512, 512)
    ]
    small = [Extent(at, at, 4096) for at in range(0, NBYTES, 4096)]
    reads.append(side.transport.read(source.incarnation, small))
    outcomes = side.outcomes(len(reads))
    assert sorted(outcome.read for outcome in outcomes) == sorted(reads)
    assert all(outcome.is_complete for outcome in outcomes)
    assert side.transport.poll() == []
    assert (side.pool == pattern(1, NBYTES)).all()


def test_a_read_sees_what_the_source_wrote_before_it(source: SourceProcess, side: Side) -> None:
    side.connect(source)
    for seed in (5, 6, 7):
        assert source.ask(f"fill {seed}") == "filled"
        assert side.read(source, WHOLE).is_complete
        assert (side.pool == pattern(seed, NBYTES)).all()


def test_a_killed_source_ends_its_reads_in_bounded_time(source: SourceProcess, side: Side) -> None:
    peer = side.connect(source)
    assert side.read(source, WHOLE).is_complete
    source.kill()
    failed: list[ReadId] = []
    try:
        failed.append(side.transport.read(peer, WHOLE))
    except PeerLostError:
        assert not side.transport.is_connected(peer)
    for outcome in side.outcomes(len(failed)):
        assert not outcome.is_complete
        assert not side.transport.is_connected(peer)
    with pytest.raises(PeerLostError):
        side.transport.read(peer, WHOLE)


def test_a_source_killed_in_mid_read_fails_it_and_nothing_lands_later(
    source: SourceProcess, side: Side
) -> None:
    peer = side.connect(source)
    assert side.read(source, WHOLE[:1]).is_complete
    source.freeze()
    reads = [side.transport.read(peer, WHOLE) for _ in range(2)]
    early = side.transport.poll()
    source.kill()
    outcomes = [*early, *(side.outcomes(len(reads) - len(early)) if len(early) < 2 else [])]
    assert sorted(outcome.read for outcome in outcomes) == sorted(reads)
    side.pool[:] = 0x5A
    assert side.transport.poll() == []
    assert (side.pool == 0x5A).all()


def test_other_peers_reads_go_on_while_one_is_torn_down(
    make_source: MakeSource, side: Side
) -> None:
    frozen, healthy = make_source("frozen"), make_source("healthy", seed=9)
    for source in (frozen, healthy):
        side.connect(source)
        assert side.read(source, WHOLE[:1]).is_complete
    frozen.freeze()
    side.transport.read(frozen.incarnation, WHOLE[:8])
    good = side.transport.read(healthy.incarnation, WHOLE[100:])
    side.transport.tear_down(frozen.incarnation)
    outcomes = side.outcomes(1)
    while good not in {outcome.read for outcome in outcomes}:
        outcomes += side.outcomes(1)
    assert next(outcome for outcome in outcomes if outcome.read == good).is_complete
    assert (side.pool[100 * BLOCK :] == pattern(9, NBYTES)[100 * BLOCK :]).all()


def test_a_restarted_source_of_the_same_name_is_a_new_peer(
    make_source: MakeSource, side: Side
) -> None:
    first = make_source("source")
    side.connect(first)
    assert side.read(first, WHOLE[:2]).is_complete
    first.kill()
    second = make_source("source", seed=2)
    side.transport.tear_down(first.incarnation)
    side.connect(second)
    assert side.read(second, WHOLE).is_complete
    assert (side.pool == pattern(2, NBYTES)).all()


def test_two_agents_that_start_together_both_work(make_source: MakeSource, case: Case) -> None:
    """A pair that initialises at once looped in UCX elsewhere (nixl issue 1668)."""
    sources = [make_source("a", 3), make_source("b", 4)]
    sides = [Side(case, name) for name in ("ra", "rb")]
    for side in sides:
        for source in sources:
            side.connect(source)
            assert side.read(source, WHOLE[:4]).is_complete
        side.transport.close()


def test_an_idle_pair_uses_no_cpu(source: SourceProcess, side: Side) -> None:
    """With something to wait on, the source goes on serving meanwhile; else it has to be told."""
    side.connect(source)
    assert side.read(source, WHOLE).is_complete
    if side.transport.wake_descriptor is None:
        assert source.ask("idle") == "idle"
    before, mine = float(source.ask("usage")), time.process_time()
    if side.transport.wake_descriptor is not None:
        assert side.transport.poll() == []
        side.pause(IDLE_S)
    else:
        select.select([], [], [], IDLE_S)
    # A thread that spins uses all of it, and waking up no more than some milliseconds
    assert float(source.ask("usage")) - before < IDLE_S / 2, "a thread of the source spins"
    assert time.process_time() - mine < IDLE_S / 2, "a thread of the reader spins"


def test_the_path_is_told_of_connected_peers_only(
    source: SourceProcess, side: Side, case: Case
) -> None:
    with pytest.raises(PeerLostError):
        side.transport.path(source.incarnation)
    side.connect(source)
    assert side.transport.path(source.incarnation).kind in {case.path, "unknown"}
    side.transport.tear_down(source.incarnation)
    with pytest.raises(PeerLostError):
        side.transport.path(source.incarnation)


def test_bad_calls_are_refused_before_anything_is_posted(source: SourceProcess, side: Side) -> None:
    peer, name = side.connect(source), side.transport.name
    for bad in ([], [Extent(0, 0, 0)], [Extent(-1, 0, 4)], [Extent(0, NBYTES - 3, 4)]):
        with pytest.raises(TransferError):
            side.transport.read(peer, bad)
    with pytest.raises(TransferError):
        side.transport.connect(Incarnation("x"), PoolEndpoint(name, b"junk", 1, 1))
    with pytest.raises(TransferError):
        side.transport.connect(Incarnation("x"), PoolEndpoint("other", b"", 1, 1))
    with pytest.raises(PeerLostError):
        side.transport.read(Incarnation("x"), WHOLE)
    with pytest.raises(ConfigError):
        side.transport.register(side.pool.ctypes.data, NBYTES)
    assert side.transport.tear_down(Incarnation("x")) == []
    assert side.read(source, WHOLE).is_complete


def test_connecting_to_a_dead_source_is_an_error_not_a_hang(
    source: SourceProcess, side: Side
) -> None:
    source.kill()
    try:
        side.connect(source)
        side.transport.read(source.incarnation, WHOLE)
    except TransferError:
        return
    (outcome,) = side.outcomes()
    assert not outcome.is_complete


def test_close_ends_everything(source: SourceProcess, side: Side) -> None:
    peer = side.connect(source)
    assert side.read(source, WHOLE[:1]).is_complete
    source.freeze()
    side.transport.read(peer, WHOLE)
    side.transport.close()
    side.pool[:] = 0x5A
    source.wake()
    select.select([], [], [], 0.2)
    assert (side.pool == 0x5A).all()


def test_nothing_is_printed_to_a_users_terminal(source: SourceProcess, side: Side) -> None:
    side.connect(source)
    assert side.read(source, WHOLE).is_complete
    name = side.transport.name
    with pytest.raises(TransferError):
        side.transport.connect(Incarnation("x"), PoolEndpoint(name, b"junk", 1, 1))
    side.transport.close()
    assert source.close() == ""
