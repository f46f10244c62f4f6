"""An update that is taken back ends its own workers, and touches none that serve.

The failures guarded against: a stuck worker of the update that keeps the place of one that would
serve, and a worker of the config before that is replaced though it runs by what is wanted again.
"""

from dataclasses import replace

import pytest

from deploy.supervision.desired import Action, Drain, Forget, Kill, Start, State
from deploy.supervision.reconciler import Reconciler
from tests.deploy.reconciled_world import LIMITS, World, started

NO_SURGE = replace(LIMITS, max_surge=0)
STUCK: tuple[State, ...] = ("pending", "starting", "dead", "refused")


def updated(world: World, stuck: State) -> None:
    """Begin an update whose first worker stays ``stuck``, as often as it is started anew."""
    world.want(revision="b")
    for _ in range(20):
        world.act(1.0)
        for name in world.names(state="draining"):
            world.put(name, "ended")
        for name in world.names(state="pending", revision="b"):
            world.put(name, stuck)


def taken_back(world: World) -> list[Action]:
    """Take the update back, and return what is done about it until nothing more is."""
    world.want(revision="a")
    actions: list[Action] = []
    for _ in range(10):
        actions += world.act(1.0)
        for name in world.names(state="pending", revision="a"):
            world.put(name, "ready")
    return actions


@pytest.mark.parametrize("stuck", STUCK)
def test_the_stuck_worker_beside_the_old_ones_goes_and_they_stay_untouched(stuck: State) -> None:
    world = started(decode=2)
    updated(world, stuck)
    ends: list[Action] = [Forget("decode-2")]
    if stuck in {"pending", "starting"}:
        ends = [Kill("decode-2", "not wanted any more", is_unwanted=True), Forget("decode-2")]
    assert taken_back(world) == ends
    assert world.names(state="ready", revision="a") == world.names() == {"decode-0", "decode-1"}


@pytest.mark.parametrize("stuck", STUCK)
def test_the_stuck_worker_in_the_place_of_an_old_one_is_followed_by_one_of_the_config_before(
    stuck: State,
) -> None:
    world = started(NO_SURGE, decode=3)
    updated(world, stuck)
    assert world.names(state="ready") == {"decode-0", "decode-1"}
    actions = taken_back(world)
    starts = [action for action in actions if isinstance(action, Start)]
    assert [(start.name, start.revision) for start in starts] == [("decode-2", "a")]
    assert {action.name for action in actions} == {"decode-2"}
    assert world.names(state="ready", revision="a") == world.names()


def test_mutation_with_only_those_who_serve_replaced_one_that_waits_for_room_stays_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Reconciler, "_out_of_place", lambda *_: None)
    with pytest.raises(AssertionError):
        test_the_stuck_worker_in_the_place_of_an_old_one_is_followed_by_one_of_the_config_before(
            "pending"
        )


@pytest.mark.parametrize("max_surge", [0, 1, 2])
@pytest.mark.parametrize("stuck", STUCK)
def test_amid_a_half_done_update_what_serves_by_either_config_is_replaced_one_by_one(
    stuck: State, max_surge: int
) -> None:
    world = started(replace(LIMITS, max_surge=max_surge), decode=3)
    world.want(revision="b")
    while not world.names(state="ready", revision="b"):
        world.act(1.0)
        for name in world.names(state="draining"):
            world.put(name, "ended")
        for name in sorted(world.names(state="pending"))[:1]:
            world.put(name, "ready")
    updated(world, stuck)
    served = world.names(state="ready", revision="a")
    assert served
    world.want(revision="a")
    for _ in range(40):
        drained = [a.name for a in world.act(1.0) if isinstance(a, Drain)]
        assert not served & set(drained), "it runs by what is wanted"
        for name in world.names(state="draining"):
            world.put(name, "ended")
        for name in world.names(state="pending", revision="a"):
            world.put(name, "ready")
        assert len(world.names(state="ready")) >= 3 - (max_surge == 0) - 1
    assert world.names(state="ready", revision="a") == world.names()
    assert len(world.names()) == 3


def test_without_room_for_a_surge_an_update_amid_the_start_stops_at_its_first_worker() -> None:
    world = World(NO_SURGE, decode=2)
    world.act()
    for name in list(world.seen):
        world.put(name, "starting")
    updated(world, "dead")
    assert world.names(state="starting", revision="a") == {"decode-0"}


def test_deaths_by_a_config_do_not_count_against_the_one_before() -> None:
    world = started(NO_SURGE, decode=2)
    world.want(revision="b")
    world.act()
    world.put("decode-1", "ended")
    world.act()
    for _ in range(LIMITS.max_restarts):
        world.put("decode-1", "dead")
        world.act(LIMITS.restart_backoff_max_s)
    world.put("decode-1", "dead")
    world.want(revision="a")
    assert world.act() == [Start("decode-1", "decode", "a", deaths=1)]
    world.put("decode-1", "dead")
    assert world.act() == [], "its first death by this config"
    assert world.act(LIMITS.restart_backoff_max_s) == [Start("decode-1", "decode", "a", deaths=2)]
