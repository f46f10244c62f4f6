"""Every event is decided in every state, and no end forgets the blocks."""

import itertools

import pytest

from core.errors import InvalidTransitionError
from decode.state import TRANSITIONS, Action, Event, State, advance

LOADS = {Event.LOAD_BEGAN, Event.LOADED, Event.LOAD_FAILED}
IMPOSSIBLE = {
    *((state, event) for state in (State.READY, State.RUNNING) for event in LOADS),
    *((State.REMOTE, event) for event in (Event.LOAD_BEGAN, Event.LOADED)),
    *((State.WAITING, event) for event in (Event.LOADED, Event.LOAD_FAILED)),
    *(
        (State.LOADING, event)
        for event in Event
        if event not in {Event.LOADED, Event.LOAD_FAILED, Event.ABORTED}
    ),
    *((State.WAITING, event) for event in (Event.DELIVERED, Event.PREEMPTED, Event.FINISHED)),
    (State.WAITING, Event.PREFILL_LOST),
    *((State.REMOTE, event) for event in (Event.ADMITTED, Event.PREEMPTED, Event.FINISHED)),
    (State.READY, Event.DELIVERED),
    (State.READY, Event.PREFILL_LOST),
    *((State.RUNNING, event) for event in (Event.ADMITTED, Event.DELIVERED, Event.PREFILL_LOST)),
    *((State.GONE, event) for event in Event if event is not Event.ABORTED),
}


def test_every_pair_of_state_and_event_is_decided_once() -> None:
    assert set(itertools.product(State, Event)) == set(TRANSITIONS) ^ IMPOSSIBLE


def test_blocks_are_released_exactly_where_ownership_ends() -> None:
    owning = {State.REMOTE, State.LOADING, State.READY, State.RUNNING}
    for (state, event), (after, actions) in TRANSITIONS.items():
        ends = state in owning and after not in owning
        assert (Action.RELEASE_BLOCKS in actions) == ends, (state, event)


def test_slots_are_freed_exactly_when_a_sequence_leaves_the_batch() -> None:
    for (state, event), (after, actions) in TRANSITIONS.items():
        leaves = state is State.RUNNING and after is not State.RUNNING
        assert (Action.FREE_SLOT in actions) == leaves, (state, event)


def test_impossible_pair_is_an_error_that_names_both() -> None:
    with pytest.raises(InvalidTransitionError, match="DELIVERED in state WAITING"):
        advance(State.WAITING, Event.DELIVERED)
