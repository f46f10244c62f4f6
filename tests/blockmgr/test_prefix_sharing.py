"""Sharing must not change what anyone reads, and looking must not change what is shared.

A lookup that bumps a reference or an LRU place, and then fails to admit, leaks or starves; a hash
that can collide answers one caller with another's context.
"""

import pytest

from blockmgr.block_manager import BlockManager
from blockmgr.free_queue import BlockIds
from blockmgr.history import BlockHistory
from blockmgr.states import BlockState
from blockmgr.token_run import TokenRun, namespace_of
from core.errors import DoubleReleaseError, InvalidTransitionError, OutOfBlocksError
from core.ids import BlockId, OperationId
from tests.blockmgr.conftest import MakeManager
from tests.blockmgr.words import (
    admit_new,
    admit_with_hit,
    ids_of,
    num_free,
    owner_of,
    run_of,
    take_one,
)


def cache_prompt(blocks: BlockManager, name: str, tokens: range) -> list[int]:
    """Leave the full blocks of ``tokens`` cached without an owner; return their ids."""
    admit_with_hit(blocks, name, tokens)
    owner = owner_of(name)
    block_ids = ids_of(blocks, owner)
    blocks.settle(owner, len(tokens))
    blocks.release(owner)
    return list(block_ids[: len(tokens) // 16])


def test_settled_full_blocks_are_shared_and_nothing_else(make_manager: MakeManager) -> None:
    # Given 40 tokens, of which 20 have settled
    blocks = make_manager(10)
    run = run_of(range(40))
    admit_with_hit(blocks, "R", range(40))
    assert blocks.count_cached_tokens(run) == 0
    blocks.settle(owner_of("R"), 20)
    assert blocks.count_cached_tokens(run) == 16

    # When all have settled, then the two full blocks hit, also while their owner lives
    blocks.settle(owner_of("R"), 40)
    assert admit_with_hit(blocks, "S", range(40)) == 32
    assert ids_of(blocks, owner_of("R"))[:2] == ids_of(blocks, owner_of("S"))[:2]
    assert ids_of(blocks, owner_of("R"))[2] != ids_of(blocks, owner_of("S"))[2]
    assert (blocks.stats.query_tokens, blocks.stats.hit_tokens) == (64, 32)


def test_i8_looking_changes_nothing(make_manager: MakeManager) -> None:
    # Given two cached prompts
    blocks = make_manager(4)
    first = cache_prompt(blocks, "R", range(32))
    second = cache_prompt(blocks, "S", range(100, 132))

    # When the older one is looked up
    assert blocks.count_cached_tokens(run_of(range(32))) == 32

    # Then it is still the first to be evicted, from its tail
    assert [take_one(blocks, "A"), take_one(blocks, "B")] == [first[1], first[0]]
    assert blocks.count_cached_tokens(run_of(range(100, 132))) == 32
    assert second


def test_i8_f03_a_failed_admission_leaves_no_trace(make_manager: MakeManager) -> None:
    # Given a cached prompt that is next to be evicted, and one free block
    blocks = make_manager(4)
    cached = cache_prompt(blocks, "R", range(32))
    holder = admit_new(blocks, "H", 16)
    run = run_of(range(80))
    before = (blocks.counts(), [blocks.generation(at) for at in cached])

    # When a request hits it but does not fit: its hit cannot be evicted for its own sake
    for _ in range(3):
        with pytest.raises(OutOfBlocksError) as failure:
            blocks.admit(owner_of("S"), tokens=run, num_cached_tokens=32, num_tokens=80)

    # Then nothing has changed, and the order of eviction is the same
    assert (failure.value.requested, failure.value.free) == (3, 1)
    assert not blocks.holds(owner_of("S"))
    assert before == (blocks.counts(), [blocks.generation(at) for at in cached])
    assert blocks.stats.allocation_failures == 3
    assert blocks.stats.query_tokens == 32
    blocks.grow(holder, 32)
    assert take_one(blocks, "A") == cached[1]


def test_i8_a_failed_growth_takes_nothing(make_manager: MakeManager) -> None:
    blocks = make_manager(3)
    owner = admit_new(blocks, "R", 16)

    with pytest.raises(OutOfBlocksError):
        blocks.grow(owner, 80)

    assert (blocks.num_tokens_covered(owner), num_free(blocks)) == (16, 2)


def test_i4_a_second_release_harms_nobody(make_manager: MakeManager) -> None:
    # Given R gone, and its block with S now
    blocks = make_manager(1)
    owner = admit_new(blocks, "R", 16)
    blocks.release(owner)
    other = admit_new(blocks, "S", 16)

    # When R is released again
    with pytest.raises(DoubleReleaseError):
        blocks.release(owner)

    assert blocks.stats.double_releases == 1
    assert blocks.counts()[BlockState.ACTIVE] == 1
    assert ids_of(blocks, other) == [0]


def test_free_blocks_are_taken_before_cached_ones(make_manager: MakeManager) -> None:
    blocks = make_manager(4)
    cache_prompt(blocks, "R", range(32))

    admit_new(blocks, "S", 32)

    assert blocks.stats.evictions == 0
    assert blocks.count_cached_tokens(run_of(range(32))) == 32


def test_a_hit_makes_its_blocks_the_last_to_be_evicted(make_manager: MakeManager) -> None:
    blocks = make_manager(4)
    cache_prompt(blocks, "R", range(32))
    cache_prompt(blocks, "S", range(100, 132))
    cache_prompt(blocks, "R", range(32))

    admit_new(blocks, "F", 32)

    assert blocks.count_cached_tokens(run_of(range(32))) == 32
    assert blocks.count_cached_tokens(run_of(range(100, 132))) == 0


def test_of_two_equal_blocks_the_first_is_kept(make_manager: MakeManager) -> None:
    # Given two owners that compute the same prompt at the same time
    blocks = make_manager(10)
    first = admit_new(blocks, "R", 32, tokens=range(32))
    second = admit_new(blocks, "S", 32, tokens=range(32))
    kept = ids_of(blocks, first)
    blocks.settle(first, 32)
    blocks.settle(second, 32)

    # When both end, then one copy is cached and the other is free
    blocks.release(second)
    blocks.release(first)
    assert blocks.counts()[BlockState.CACHED] == 2
    assert admit_with_hit(blocks, "T", range(32)) == 32
    assert ids_of(blocks, owner_of("T")) == kept


def test_an_evicted_block_can_be_cached_again(make_manager: MakeManager) -> None:
    blocks = make_manager(2)
    for start in (0, 100, 0, 100):
        cache_prompt(blocks, f"R{start}", range(start, start + 32))
        assert blocks.count_cached_tokens(run_of(range(start, start + 32))) == 32
    assert blocks.stats.evictions == 6


def test_without_prefix_caching_nothing_is_shared(make_manager: MakeManager) -> None:
    blocks = make_manager(10, prefix_caching=False)
    admit_with_hit(blocks, "R", range(32))
    blocks.settle(owner_of("R"), 32)
    assert admit_with_hit(blocks, "S", range(32)) == 0
    blocks.release(owner_of("R"))
    assert num_free(blocks) == 8


def test_admitting_twice_or_with_a_wrong_hit_is_refused(make_manager: MakeManager) -> None:
    blocks = make_manager(10)
    cache_prompt(blocks, "C", range(32))
    admit_new(blocks, "R", 16)
    run = run_of(range(48))
    for name, num_cached_tokens in (("R", 0), ("S", 48), ("S", 20), ("S", 64)):
        with pytest.raises(InvalidTransitionError):
            blocks.admit(
                owner_of(name), tokens=run, num_cached_tokens=num_cached_tokens, num_tokens=64
            )
    assert blocks.owners == [owner_of("R")]


def test_settling_beyond_the_blocks_is_refused(make_manager: MakeManager) -> None:
    blocks = make_manager(10)
    owner = admit_new(blocks, "R", 16)
    with pytest.raises(InvalidTransitionError):
        blocks.settle(owner, 17)


# Leases


def test_d01_a_lease_pins_until_its_release(make_manager: MakeManager) -> None:
    # Given a finished prefill of 3 blocks, promised to a reader
    blocks = make_manager(3)
    owner = admit_new(blocks, "R", 48, tokens=range(48))
    blocks.complete_step(blocks.dispatch_step([owner]))
    blocks.settle(owner, 48)
    blocks.lease(owner)
    assert blocks.counts()[BlockState.LEASED] == 3
    with pytest.raises(OutOfBlocksError):
        take_one(blocks, "X")

    # When the reader's completion arrives
    blocks.release(owner)

    # Then its blocks are cached, and released once
    assert blocks.counts()[BlockState.CACHED] == 3
    with pytest.raises(DoubleReleaseError):
        blocks.release(owner)
    assert take_one(blocks, "Y") >= 0


def test_a_leased_block_that_a_live_request_shares_is_active(make_manager: MakeManager) -> None:
    blocks = make_manager(10)
    admit_with_hit(blocks, "R", range(32))
    blocks.settle(owner_of("R"), 32)
    blocks.lease(owner_of("R"))
    admit_with_hit(blocks, "S", range(32))
    assert blocks.counts()[BlockState.ACTIVE] == 2

    blocks.release(owner_of("S"))
    assert blocks.counts()[BlockState.LEASED] == 2
    blocks.release(owner_of("R"))
    assert blocks.num_allocatable == 10


def test_a_lease_does_not_grow_and_is_not_leased_again(make_manager: MakeManager) -> None:
    blocks = make_manager(10)
    owner = admit_new(blocks, "R", 16)
    blocks.lease(owner)
    with pytest.raises(InvalidTransitionError):
        blocks.grow(owner, 32)
    with pytest.raises(InvalidTransitionError):
        blocks.lease(owner)


def test_d18_a_lease_and_a_copy_both_hold(make_manager: MakeManager) -> None:
    blocks = make_manager(3)
    owner = admit_new(blocks, "R", 48)
    blocks.lease(owner)
    blocks.begin_operation(owner, ids_of(blocks, owner), OperationId(1))
    blocks.release(owner)
    assert blocks.counts()[BlockState.QUARANTINED] == 3
    blocks.end_operation(OperationId(1))
    assert num_free(blocks) == 3


# Observers and token runs


class Transitions:
    """Writes down which blocks changed their state, and how."""

    def __init__(self) -> None:
        self.seen: list[tuple[list[int], str, str]] = []

    def moved(self, block_ids: BlockIds, old: BlockState, new: BlockState) -> None:
        self.seen.append((block_ids.tolist(), old.name, new.name))


def test_an_observer_sees_every_block_become_free_before_it_is_allocated(
    make_manager: MakeManager,
) -> None:
    transitions = Transitions()
    blocks = make_manager(3, observers=[transitions], history=BlockHistory(3))
    owner = admit_new(blocks, "R", 48, tokens=range(16))
    blocks.settle(owner, 48)
    assert transitions.seen == [([0, 1, 2], "FREE", "ACTIVE")]

    blocks.release(owner)
    assert sorted(transitions.seen[1:]) == [
        ([0], "ACTIVE", "CACHED"),
        ([2, 1], "ACTIVE", "FREE"),
    ]
    admit_new(blocks, "S", 48)
    assert transitions.seen[3:] == [([0], "CACHED", "FREE"), ([0, 1, 2], "FREE", "ACTIVE")]
    assert "block=0 generation=2 state=ACTIVE last_owner=('S', 1)" in blocks.describe(BlockId(0))


def test_runs_tell_apart_all_that_decides_the_content(make_manager: MakeManager) -> None:
    blocks = make_manager(10)
    cache_prompt(blocks, "R", range(64))
    other = namespace_of(fingerprint="", salt="model")

    assert blocks.count_cached_tokens(run_of(range(64))) == 64
    assert blocks.count_cached_tokens(run_of(range(63))) == 48
    assert blocks.count_cached_tokens(run_of(range(64), salt="tenant")) == 0
    assert blocks.count_cached_tokens(TokenRun(other, 16, range(64))) == 0
    assert blocks.count_cached_tokens(run_of(range(1, 65))) == 0
    assert blocks.count_cached_tokens(run_of([9, *range(1, 64)])) == 0


def test_digests_name_a_block_with_all_that_came_before() -> None:
    namespace = namespace_of(fingerprint="m", salt="s")
    grown = TokenRun(namespace, 16, range(40))
    short = grown.digests(2)
    grown.extend(range(40, 90))

    whole = TokenRun(namespace, 16, range(90)).digests(5)
    different = [
        TokenRun(namespace_of(fingerprint="m", salt="x"), 16, range(90)).digests(5),
        TokenRun(namespace_of(fingerprint="ms"), 16, range(90)).digests(5),
        TokenRun(namespace, 32, range(90)).digests(2),
        TokenRun(namespace, 16, [7, *range(1, 90)]).digests(5),
    ]

    assert (short, grown.digests(5)) == (whole[:2], whole)
    assert len({digest for digests in [whole, *different] for digest in digests}) == 22
