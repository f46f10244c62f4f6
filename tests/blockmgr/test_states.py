"""A state must follow from what holds a block, or an order of events exists that makes it a lie."""

import itertools

import numpy as np

from blockmgr.states import (
    MASK_OF_HOLD,
    SHIFT_OF_HOLD,
    UNIT_OF_HOLD,
    BlockState,
    Hold,
    state_of,
    state_of_word,
    states_of,
)

ALL_HOLDS = [
    frozenset(holds)
    for count in range(len(Hold) + 1)
    for holds in itertools.combinations(Hold, count)
]


def word_of(holds: frozenset[Hold]) -> int:
    return sum(UNIT_OF_HOLD[hold] for hold in holds)


def test_i1_every_set_of_holds_is_exactly_one_state() -> None:
    words = np.array([word_of(holds) for holds in ALL_HOLDS])
    for holds, state in zip(ALL_HOLDS, states_of(words).tolist(), strict=True):
        if Hold.WRITE in holds and Hold.OPERATION not in holds:
            continue  # who writes is an operation
        assert BlockState(state) is state_of(holds) is state_of_word(word_of(holds))
    assert set(states_of(words).tolist()) == {state.value for state in BlockState}


def test_the_counters_of_a_word_neither_overlap_nor_reach_its_sign() -> None:
    assert sum(MASK_OF_HOLD) == 2**63 - 1
    for hold in Hold:
        assert MASK_OF_HOLD[hold] % UNIT_OF_HOLD[hold] == 0
        assert UNIT_OF_HOLD[hold] == 1 << SHIFT_OF_HOLD[hold]


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
