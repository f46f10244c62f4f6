"""Every event is decided in every phase, an end stays, and no worker is left with what is over."""

import itertools

from router.request_phase import ENDS, ON_WORKER, TRANSITIONS, Action, Event, Phase, advance

OF_WORKERS = {
    Event.FIRST_TOKEN,
    Event.FINISHED,
    Event.STOPPED,
    Event.UNREADABLE,
    Event.ATTEMPT_LOST,
    Event.ATTEMPTS_OVER,
}
SAYS_THAT_NOTHING_IS_LEFT = {Event.FINISHED, Event.ATTEMPT_LOST, Event.ATTEMPTS_OVER}
CHANGES_NOTHING = {
    *itertools.product(ENDS, Event),
    *itertools.product((Phase.QUEUED, Phase.BACKOFF), OF_WORKERS),
    *itertools.product(ON_WORKER, (Event.PLACED, Event.NOT_PLACED, Event.RETRY_DUE)),
    (Phase.QUEUED, Event.RETRY_DUE),
    (Phase.BACKOFF, Event.PLACED),
    (Phase.BACKOFF, Event.NOT_PLACED),
    (Phase.DECODE, Event.FIRST_TOKEN),
}


def test_every_pair_of_phase_and_event_is_decided_once() -> None:
    assert set(itertools.product(Phase, Event)) == set(TRANSITIONS) ^ CHANGES_NOTHING
    assert not set(TRANSITIONS) & CHANGES_NOTHING


def test_what_comes_too_late_changes_nothing() -> None:
    for phase, event in CHANGES_NOTHING:
        assert advance(phase, event) == (phase, ())


def test_a_worker_is_told_exactly_where_it_may_go_on_with_what_is_left_behind() -> None:
    for (phase, event), (after, actions) in TRANSITIONS.items():
        leaves = phase in ON_WORKER and after not in ON_WORKER
        is_told = leaves and event not in SAYS_THAT_NOTHING_IS_LEFT
        assert (Action.ABORT in actions) == is_told, (phase, event)


def test_a_worker_gets_the_sequence_exactly_where_it_is_dispatched() -> None:
    for (phase, event), (after, actions) in TRANSITIONS.items():
        enters = phase not in ON_WORKER and after in ON_WORKER
        assert (Action.DISPATCH in actions) == enters, (phase, event)


def test_a_client_is_told_exactly_where_a_sequence_ends_and_it_is_there() -> None:
    for (phase, event), (after, actions) in TRANSITIONS.items():
        ends = after in {Phase.FINISHED, Phase.FAILED}
        assert actions.count(Action.ANSWER) == ends, (phase, event)


def test_every_phase_can_end_by_the_clients_leaving_and_by_the_timeout() -> None:
    for phase in set(Phase) - ENDS:
        assert advance(phase, Event.LEFT)[0] is Phase.CANCELLED
        assert advance(phase, Event.GIVEN_UP)[0] is Phase.FAILED
