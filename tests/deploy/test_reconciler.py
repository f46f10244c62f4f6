"""What the supervision decides: never fewer ready workers than wanted by its own doing.

The failures guarded against: a rolling update that drains the old before the new serves, a worker
that crashes at its start and takes a core by crashing again and again, a frozen process that counts
as alive, two processes under one name after the controller came back, one that ends workers because
it does not know yet that they serve, and a change that never ends.
"""

from dataclasses import replace

import pytest

from deploy.supervision.desired import (
    Desired,
    Drain,
    Forget,
    GiveUp,
    Kill,
    Start,
    State,
    Target,
)
from deploy.supervision.member import backoff_s
from deploy.supervision.reconciler import Reconciler
from tests.deploy.reconciled_world import LIMITS, World, started


def test_what_is_wanted_is_started_and_then_nothing_happens() -> None:
    world = started(prefill=2, decode=1)
    assert world.names(state="ready") == {"prefill-0", "prefill-1", "decode-0"}
    assert world.act() == []


def test_scale_down_drains_the_last_and_forgets_them_when_they_have_ended() -> None:
    world = started(decode=3)
    world.want(decode=1)
    assert set(world.act()) == {Drain("decode-1"), Drain("decode-2")}
    assert world.act(1.0) == []
    world.put("decode-2", "ended")
    assert world.act() == [Forget("decode-2")]


def test_scale_down_takes_one_that_does_not_serve_first() -> None:
    world = started(decode=2)
    world.put("decode-0", "dead")
    world.want(decode=1)
    assert world.act() == [Forget("decode-0")]


def test_a_drain_that_takes_too_long_is_ended() -> None:
    world = started(decode=2)
    world.want(decode=1)
    world.act()
    assert world.act(LIMITS.drain_timeout_s) == []
    assert world.act(1.0) == [Kill("decode-1", "not drained after 60 s")]
    assert world.act() == [Forget("decode-1")]


def test_an_update_starts_one_new_at_a_time_and_drains_an_old_one_when_it_serves() -> None:
    world = started(decode=2)
    world.want(revision="b")
    assert world.act() == [Start("decode-2", "decode", "b")]
    assert world.act(1.0) == []
    world.put("decode-2", "ready")
    assert world.act() == [Drain("decode-1")]
    assert world.act(1.0) == [], "the next starts when the drained one is gone"
    world.put("decode-1", "ended")
    assert world.act() == [Forget("decode-1"), Start("decode-1", "decode", "b")]
    world.settle()
    assert world.names(state="ready", revision="b") == world.names()
    assert len(world.names()) == 2


def test_without_room_for_a_surge_an_update_drains_one_before_its_successor_starts() -> None:
    world = started(replace(LIMITS, max_surge=0), decode=2)
    world.want(revision="b")
    assert world.act() == [Drain("decode-1")]
    assert world.act(1.0) == [], "there is room when the drained one is gone"
    world.put("decode-1", "ended")
    assert world.act() == [Forget("decode-1"), Start("decode-1", "decode", "b")]
    assert world.act(1.0) == [], "one at a time"
    world.put("decode-1", "ready")
    assert world.act() == [Drain("decode-0")]
    world.settle()
    assert world.names(state="ready", revision="b") == world.names() == {"decode-0", "decode-1"}


def test_without_room_for_a_surge_a_revision_that_crashes_costs_one_worker_alone() -> None:
    world = started(replace(LIMITS, max_surge=0), decode=3)
    world.want(revision="broken")
    for _ in range(40):
        world.act(10.0)
        for name in world.names(state="draining"):
            world.put(name, "ended")
        for name in world.names(state="pending"):
            world.put(name, "dead")
    assert world.names(state="ready", revision="a") == {"decode-0", "decode-1"}


def test_an_update_whose_workers_crash_leaves_the_old_ones_serving() -> None:
    world = started(decode=2)
    world.want(revision="broken")
    for _ in range(40):
        world.act(10.0)
        for name in world.names(state="pending"):
            world.put(name, "dead")
    assert world.names(state="ready", revision="a") == {"decode-0", "decode-1"}
    world.want(revision="mended")
    world.settle()
    assert world.names(state="ready", revision="mended") == world.names()


def test_an_update_that_is_refused_leaves_the_old_ones_serving() -> None:
    world = started(decode=1)
    world.want(revision="refused")
    world.act()
    world.put("decode-1", "refused")
    assert [type(action) for action in world.act()] == [GiveUp]
    assert world.act(1000.0) == []
    assert world.names(state="ready") == {"decode-0"}


def test_a_scale_down_amid_a_refused_update_takes_what_is_refused_and_beyond_the_number() -> None:
    world = started(decode=1)
    world.want(decode=3)
    world.act()
    world.want(revision="refused")
    for _ in range(5):
        world.act(1.0)
        for name in world.names(state="pending"):
            world.put(name, "refused")
    assert len(world.names(state="refused")) == 3
    world.want(decode=1)
    world.act(1.0)
    assert world.names(state="ready", revision="a") == {"decode-0"}
    assert len(world.names()) == 1 + LIMITS.max_surge


def test_a_config_that_has_served_is_tried_again_when_a_taken_port_refuses_it() -> None:
    world = World()
    world.desired = Desired({"router": Target(1, "a")}, generation=world.desired.generation)
    world.settle(2)
    world.put("router", "dead")
    assert world.act() == [Start("router", "router", "a", deaths=1)]
    world.put("router", "refused")
    assert world.act() == [], "the second restart in a row waits"
    assert world.act(1.0) == [Start("router", "router", "a", deaths=2)]
    for _ in range(40):
        if world.names(state="pending"):
            world.put("router", "refused")
        told = world.act(10.0)
        if any(isinstance(action, GiveUp) for action in told):
            break
    assert told == [GiveUp("router", "it died 4 times in a row")]


def test_another_config_than_the_one_that_has_served_is_not_tried_again() -> None:
    world = started(replace(LIMITS, max_surge=0), decode=2)
    world.want(revision="refused")
    world.put("decode-1", "dead")
    assert Start("decode-1", "decode", "refused", deaths=1) in world.act()
    world.put("decode-1", "refused")
    assert world.act() == [GiveUp("decode-1", "its config cannot work")]


def test_the_first_restart_is_at_once_and_each_further_one_waits_longer() -> None:
    world = started(decode=1)
    waits: list[float] = []
    for deaths in range(1, LIMITS.max_restarts + 1):
        world.put("decode-0", "dead")
        waited = 0.0
        while Start("decode-0", "decode", "a", deaths) not in world.act():
            waited += 0.5
            world.now += 0.5
        waits.append(waited)
        world.put("decode-0", "ready")
        world.act()
    assert waits == [0.0, 1.0, 2.0]
    world.put("decode-0", "dead")
    assert world.act() == [GiveUp("decode-0", "it died 4 times in a row")]
    assert world.act(1000.0) == []


def test_the_wait_has_a_cap() -> None:
    assert [backoff_s(n, 8.0) for n in (1, 2, 3, 4, 5, 6, 10**6)] == [0, 1, 2, 4, 8, 8, 8]


def test_a_healthy_time_ends_the_row() -> None:
    world = started(decode=1)
    for _ in range(LIMITS.max_restarts * 3):
        world.act(LIMITS.healthy_after_s)
        world.put("decode-0", "dead")
        assert world.act() == [Start("decode-0", "decode", "a", deaths=1)]
        world.put("decode-0", "ready")
        world.act()


def test_an_operators_change_gives_a_new_chance() -> None:
    world = started(decode=1)
    world.put("decode-0", "refused")
    assert [type(action) for action in world.act()] == [GiveUp]
    world.want(decode=1)
    assert world.act() == [Start("decode-0", "decode", "a", deaths=1)]


@pytest.mark.parametrize("state", ["ready", "draining"])
def test_a_process_that_lives_but_makes_no_progress_is_ended(state: State) -> None:
    world = started(decode=1)
    world.put("decode-0", state, silence_s=30.0)
    assert not any(isinstance(action, Kill) for action in world.act())
    world.put("decode-0", state, silence_s=31.0)
    assert Kill("decode-0", "no progress for 31 s") in world.act()


def test_mutation_without_the_look_at_progress_a_frozen_process_keeps_its_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Reconciler, "_check_progress", lambda *_: None)
    with pytest.raises(AssertionError):
        test_a_process_that_lives_but_makes_no_progress_is_ended("ready")
    world = started(decode=1)
    world.put("decode-0", "ready", silence_s=10**6)
    assert world.act(10**6) == []


def test_a_kill_without_effect_is_told_again() -> None:
    world = started(decode=1)
    frozen = replace(world.seen["decode-0"], silence_s=31.0)
    world.seen["decode-0"] = frozen
    for seconds, told in ((0.0, 1), (5.0, 0), (6.0, 1)):
        world.now += seconds
        assert len(world.reconciler.decide(world.now, world.desired, world.seen)) == told


def test_a_start_that_takes_too_long_is_ended_but_not_one_that_waits_for_room() -> None:
    world = World(prefill=1, decode=1)
    world.act()
    world.put("decode-0", "starting")
    world.act(1.0)
    assert world.act(301.0) == [Kill("decode-0", "not ready after 301 s")]


def test_a17_a_worker_changes_its_role_by_an_empty_pipeline() -> None:
    world = started(prefill=2, decode=1)
    world.want(prefill=1, decode=2)
    world.desired = replace(world.desired, leaving={"prefill-0": "decode"})
    # The named one goes, not the last; nothing starts in its place while it has work
    assert world.act() == [Drain("prefill-0")]
    assert world.act(1.0) == []
    world.put("prefill-0", "ended")
    assert world.act() == [Forget("prefill-0"), Start("decode-1", "decode", "a")]
    world.settle()
    assert world.names(state="ready") == {"prefill-1", "decode-0", "decode-1"}


def test_the_only_decode_worker_that_serves_changes_its_role_after_another_one_serves() -> None:
    world = started(prefill=1, decode=1)
    world.want(prefill=2, decode=1)
    world.desired = replace(world.desired, leaving={"decode-0": "prefill"})
    assert world.act() == [Start("decode-1", "decode", "a")]
    assert world.act(1.0) == []
    world.put("decode-1", "ready")
    assert world.act() == [Drain("decode-0")]
    world.settle()
    assert world.names(state="ready") == {"prefill-0", "prefill-1", "decode-1"}


def test_a_last_decode_worker_that_is_to_change_its_role_and_dies_is_replaced() -> None:
    world = started(prefill=1, decode=1)
    world.want(prefill=2, decode=1)
    world.desired = replace(world.desired, leaving={"decode-0": "prefill"})
    world.act()
    world.put("decode-0", "dead")
    world.settle()
    assert world.names(state="ready") == {"prefill-0", "prefill-1", "decode-1"}


def test_without_room_for_a_surge_a_last_decode_worker_to_leave_waits_for_one_that_may_start() -> (
    None
):
    """Its place counts for its new role: else neither would ever go or come."""
    world = started(replace(LIMITS, max_surge=0), prefill=1, decode=2)
    world.put("decode-0", "draining")
    targets = {"prefill": Target(2, "a"), "decode": Target(1, "a")}
    world.desired = replace(world.desired, targets=targets, leaving={"decode-1": "prefill"})
    world.settle()
    assert world.names(state="ready") == {"prefill-0", "prefill-1", "decode-0"}


def test_two_workers_that_change_their_roles_crosswise_do_not_wait_for_each_other() -> None:
    world = started(prefill=1, decode=1)
    world.desired = replace(world.desired, leaving={"decode-0": "prefill", "prefill-0": "decode"})
    assert world.act() == [Drain("prefill-0")]
    world.put("prefill-0", "ended")
    assert Start("decode-1", "decode", "a") in world.act()
    world.put("decode-1", "ready")
    assert world.act() == [Drain("decode-0")]
    world.settle()
    assert world.names(state="ready") == {"prefill-0", "decode-1"}


def test_a_reconciler_that_starts_anew_goes_on_and_starts_nothing_twice() -> None:
    world = started(prefill=1, decode=3)
    world.want(decode=2)
    world.act()
    world.restart_controller()
    assert world.act() == []
    for name in sorted(world.unheard):
        world.answer(name)
        assert world.act() == []
    assert world.act(LIMITS.drain_timeout_s + 1) == [Kill("decode-2", "not drained after 60 s")]


def test_a_controller_that_starts_anew_ends_nobody_before_it_knows_who_serves() -> None:
    world = started(prefill=1, decode=3)
    world.want(prefill=0, decode=3)
    world.desired = replace(world.desired, leaving={"prefill-0": "decode"})
    world.restart_controller()
    assert world.act() == []
    for name in ("decode-0", "decode-2"):
        world.answer(name)
        assert world.act(1.0) == []
    world.answer("decode-1")
    assert world.act() == [Drain("decode-2")]
    world.answer("prefill-0")
    assert world.act() == [Drain("prefill-0")]


def test_a_process_that_never_answers_the_new_controller_is_ended() -> None:
    world = started(decode=2)
    world.restart_controller()
    world.answer("decode-1")
    world.put("decode-0", "adopted", silence_s=30.0)
    assert world.act() == []
    world.put("decode-0", "adopted", silence_s=31.0)
    assert world.act() == [Kill("decode-0", "no progress for 31 s")]
    world.unheard.clear()
    world.put("decode-0", "dead")
    assert world.act() == [Start("decode-0", "decode", "a", deaths=1)]


def test_who_is_being_killed_does_not_count_among_those_who_serve() -> None:
    world = started(decode=2)
    frozen = replace(world.seen["decode-0"], silence_s=31.0)
    world.seen["decode-0"] = frozen
    world.want(decode=1)
    assert world.act() == [Kill("decode-0", "no progress for 31 s")]
    assert world.act() == [Forget("decode-0")]
    assert world.names(state="ready") == {"decode-1"}


def test_a_router_that_its_pod_sends_away_is_followed_by_another_when_its_name_is_free() -> None:
    world = World(has_router=True, decode=1)
    world.settle(2)
    world.put("router", "draining")
    assert world.act(seconds=1.0) == []
    world.put("router", "ended")
    assert world.act(seconds=1.0) == [Forget("router"), Start("router", "router", "router")]
