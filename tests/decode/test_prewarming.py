"""The first request to a prefill worker must not pay for the pair; no pair is tried for ever."""

from core.ids import Incarnation, WorkerId
from core.messages import PrefillPeer
from decode.prewarming import FIRST_RETRY_S, LAST_RETRY_S, Prewarming


def peer(name: str, life: int = 1) -> PrefillPeer:
    return PrefillPeer(WorkerId(name), Incarnation(f"{name}-{life}"), f"tcp://{name}")


P, Q, P_AGAIN = peer("P"), peer("Q"), peer("P", 2)


def test_who_joins_is_due_at_once_and_only_once() -> None:
    candidates = Prewarming()
    assert candidates.announced("router", [P], 0.0) == []
    assert candidates.due(0.0) == [P]
    assert candidates.due(100.0) == []
    assert candidates.announced("router", [P, Q], 1.0) == []
    assert candidates.due(1.0) == [Q]
    assert candidates.next_at() is None


def test_a_pair_that_fails_is_tried_again_after_a_time_that_doubles_up_to_a_bound() -> None:
    candidates = Prewarming()
    candidates.announced("router", [P], 0.0)
    now, waits = 0.0, []
    for _ in range(12):
        assert candidates.due(now) == [P]
        candidates.failed(P.incarnation, now, is_final=False)
        at = candidates.next_at()
        assert at is not None
        waits.append(at - now)
        assert candidates.due(at - 0.01) == []
        now = at
    assert waits[:3] == [FIRST_RETRY_S, 2 * FIRST_RETRY_S, 4 * FIRST_RETRY_S]
    assert waits[-1] == LAST_RETRY_S
    # When it works for once, and is lost later, it begins anew
    candidates.due(now)
    candidates.warmed(P.incarnation)
    candidates.failed(P.incarnation, now, is_final=False)
    assert candidates.next_at() == now + FIRST_RETRY_S


def test_one_that_refuses_is_not_asked_again_in_this_life() -> None:
    candidates = Prewarming()
    candidates.announced("router", [P], 0.0)
    candidates.due(0.0)
    candidates.failed(P.incarnation, 0.0, is_final=True)
    assert candidates.next_at() is None
    candidates.announced("router", [P_AGAIN], 1.0)
    assert candidates.due(1.0) == [P_AGAIN]


def test_h04_d15_a_restart_is_a_new_pair_and_the_old_one_leaves() -> None:
    candidates = Prewarming()
    candidates.announced("router", [P, Q], 0.0)
    candidates.due(0.0)
    assert candidates.announced("router", [P_AGAIN, Q], 1.0) == [P.incarnation]
    assert candidates.due(1.0) == [P_AGAIN]
    candidates.failed(P.incarnation, 1.0, is_final=False)
    assert candidates.next_at() is None, "the old life is forgotten"


def test_a_router_that_comes_anew_takes_nobody_back() -> None:
    """It knows nobody for a moment: pairs that serve must not be dropped for that."""
    candidates = Prewarming()
    candidates.announced("router", [P], 0.0)
    candidates.router_lost("router")
    assert candidates.announced("router again", [], 1.0) == []
    assert candidates.announced("router again", [P], 2.0) == []
    assert candidates.announced("router again", [], 3.0) == [P.incarnation]


def test_who_is_known_to_one_router_has_not_left() -> None:
    candidates = Prewarming()
    candidates.announced("a", [P], 0.0)
    candidates.announced("b", [P], 0.0)
    assert candidates.announced("a", [], 1.0) == []
    assert len(candidates) == 1
    candidates.router_lost("a")
    assert candidates.announced("b", [], 1.0) == [P.incarnation]
    assert len(candidates) == 0
