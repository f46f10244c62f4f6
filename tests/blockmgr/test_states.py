"""A state must follow from what holds a block, or an order of events exists that makes it a lie."""

import itertools

import numpy as np

from blockmgr.states import STATE_OF_HOLDS, BlockState, Hold, state_of

ALL_HOLDS = [
    frozenset(holds)
    for count in range(len(Hold) + 1)
    for holds in itertools.combinations(Hold, count)
]


def test_i1_every_set_of_holds_is_exactly_one_state() -> None:
    assert len(STATE_OF_HOLDS) == len(ALL_HOLDS) == 2 ** len(Hold)
    for holds in ALL_HOLDS:
        index = sum(1 << hold for hold in holds)
        assert BlockState(int(STATE_OF_HOLDS[index])) is state_of(holds)
    assert set(STATE_OF_HOLDS.tolist()) == {state.value for state in BlockState}


def test_i2_only_a_block_that_nothing_holds_is_free() -> None:
    assert [holds for holds in ALL_HOLDS if state_of(holds) is BlockState.FREE] == [frozenset()]


def test_i2_a_cached_block_can_be_evicted_because_only_the_cache_holds_it() -> None:
    cached = [holds for holds in ALL_HOLDS if state_of(holds) is BlockState.CACHED]
    assert cached == [frozenset({Hold.CACHE})]


def test_an_owner_always_shows_before_what_would_withhold_the_block() -> None:
    owned = {BlockState.ACTIVE, BlockState.RECEIVING, BlockState.LEASED}
    for holds in ALL_HOLDS:
        has_owner = bool(holds & {Hold.OWNER, Hold.LEASE})
        assert (state_of(holds) in owned) == has_owner


def test_state_values_index_an_array() -> None:
    assert np.array_equal(sorted(state.value for state in BlockState), range(len(BlockState)))
