"""What becomes of a service's seat: every event is decided, and no process is lost from sight.

The failures guarded against: a process whose seat is given away while it runs, which holds its
place and its name for ever; a death that nobody is told of; and a late answer that brings the dead
back to life.
"""

from dataclasses import dataclass
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.errors import InvalidTransitionError
from deploy.supervision import seat_state
from deploy.supervision.seat_state import (
    ANSWERS,
    IMPOSSIBLE,
    OVER,
    TRANSITIONS,
    UP,
    SeatAction,
    SeatEvent,
    SeatState,
    after,
)

LAST_WORDS = {SeatAction.TELL_ENDED, SeatAction.TELL_DIED}


def test_every_pair_of_state_and_event_is_decided_once() -> None:
    assert set(product(SeatState, SeatEvent)) == set(TRANSITIONS) ^ IMPOSSIBLE


@pytest.mark.parametrize(("state", "event"), sorted(IMPOSSIBLE, key=str))
def test_what_only_a_bug_can_ask_for_names_the_state_and_the_event(
    state: SeatState, event: SeatEvent
) -> None:
    with pytest.raises(InvalidTransitionError, match=rf"{state.name} met {event.name}"):
        after(state, event)


def test_no_answer_is_impossible_where_a_process_may_have_sent_one() -> None:
    assert not IMPOSSIBLE & set(product((*UP, *OVER), ANSWERS))


def test_who_is_over_does_not_come_back_by_an_answer() -> None:
    for state, event in product(OVER, ANSWERS):
        assert after(state, event)[0] is state


def test_an_end_is_told_exactly_on_the_way_from_up_to_over() -> None:
    for (state, event), (then, actions) in TRANSITIONS.items():
        is_end = state in UP and then in OVER
        assert len(LAST_WORDS & set(actions)) == is_end, (state, event)


@dataclass
class Process:
    """One life under the seat's name, as Ray knows it."""

    runs: bool = True
    is_killed: bool = False


class World:
    """A seat, and all processes that ever were created for it."""

    def __init__(self) -> None:
        self.state = SeatState.VACANT
        self.processes: list[Process] = []
        self.has_current = False
        """The seat knows the last of them."""

    def may(self, event: SeatEvent) -> bool:
        """Return whether ``event`` can come: by an order that is allowed, or by a process."""
        if event in ANSWERS:
            return self.has_current and (self.processes[-1].runs or event is SeatEvent.DIED)
        return (self.state, event) in TRANSITIONS

    def meet(self, event: SeatEvent) -> None:
        if event in {SeatEvent.CREATED, SeatEvent.FOUND}:
            self.processes.append(Process())
            self.has_current = True
        if event is SeatEvent.DIED:
            self.processes[-1].runs = False
        self.state, actions = after(self.state, event)
        for action in actions:
            if action is SeatAction.KILL:
                assert self.has_current, "there is nothing to kill"
                self.processes[-1].is_killed = True
            elif action is SeatAction.CREATE:
                self.has_current = False
        if self.state is SeatState.VACANT:
            self.has_current = False

    def lost(self) -> list[Process]:
        """Return the processes that run, that no seat has, and that nobody has killed."""
        others = self.processes[:-1] if self.has_current else self.processes
        return [process for process in others if process.runs and not process.is_killed]


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_no_sequence_of_events_leaves_the_table_or_loses_a_process(data: st.DataObject) -> None:
    world = World()
    for _ in range(data.draw(st.integers(0, 40))):
        possible = [event for event in SeatEvent if world.may(event)]
        world.meet(data.draw(st.sampled_from(possible)))
        assert world.lost() == []
        assert world.has_current or world.state not in UP


@pytest.mark.parametrize("event", [SeatEvent.START_ASKED, SeatEvent.FORGET_ASKED])
def test_mutation_a_refused_process_that_is_not_killed_is_lost(
    event: SeatEvent, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = SeatState.REFUSED, event
    then, actions = TRANSITIONS[key]
    spared = tuple(action for action in actions if action is not SeatAction.KILL)
    monkeypatch.setattr(seat_state, "TRANSITIONS", {**TRANSITIONS, key: (then, spared)})
    with pytest.raises(AssertionError):
        test_no_sequence_of_events_leaves_the_table_or_loses_a_process()
