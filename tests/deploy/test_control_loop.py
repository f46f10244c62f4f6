"""A call into Ray that is answered late keeps no command waiting, and nothing wanted is lost by it.

The failures guarded against: ``sluice scale`` and ``sluice status`` that time out while the
controller starts a worker, a service that nobody finds again since it was started before its name
was stored, and a change that is overwritten by what was wanted before it.
"""

import logging
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import pytest

from core.config import DeployConfig, SluiceConfig
from deploy.supervision.control_loop import ControlLoop, Row
from deploy.supervision.events import (
    Event,
    GaveUp,
    ProcessDied,
    ProcessIdentity,
    ProcessStarted,
    ServiceEnded,
)
from deploy.supervision.outcome import Taken
from tests.deploy.controlled_world import GATE_WAIT_S, OnePlan, World
from tests.deploy.ray_cluster import wait_until

ANSWER_WAIT_S = 20.0
"""An answer that waits for the services does not come at all: they stand still meanwhile."""
LIFE = ProcessIdentity(1, "here", "decode-0", "decode", "a")
T = TypeVar("T")


@pytest.fixture
def world() -> World:
    return World()


def answer(call: Callable[[], T]) -> T:
    """Return what ``call`` does, called by another thread; fail if it stands still."""
    answers: list[T] = []
    thread = threading.Thread(target=lambda: answers.append(call()), daemon=True)
    thread.start()
    thread.join(ANSWER_WAIT_S)
    assert answers, "no answer"
    return answers[0]


def test_commands_are_answered_while_a_start_stands_still(
    world: World,
) -> None:
    loop = world.loop
    with world.standing(world.services.gate, world.step):
        assert answer(lambda: world.scale({"decode": 3}, {})) == Taken()
        assert world.wanted() == {"prefill": 1, "decode": 3}
        assert answer(loop.services) == []
        assert answer(lambda: loop.events(0, 0, 0.0))[1:] == (0, [])
        assert "decode=0" in str(answer(lambda: world.scale({"decode": 0}, {})))

    # Then what was wanted meanwhile is done next, and nobody was started twice
    assert sorted(world.services.seen) == ["decode-0", "decode-1", "prefill-0"]
    world.step()
    assert sorted(world.services.seen) == ["decode-0", "decode-1", "decode-2", "prefill-0"]
    assert world.wanted() == {"prefill": 1, "decode": 3}
    world.step()
    assert (world.services.told[-1].prefill, world.services.told[-1].decode) == (1, 3)


def test_mutation_with_the_lock_held_while_acting_no_command_is_answered(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    carry_out = ControlLoop._carry_out

    def under_the_lock(self: ControlLoop, *arguments: object) -> Event | None:
        with world.orders._lock:
            return carry_out(self, *arguments)

    monkeypatch.setattr(ControlLoop, "_carry_out", under_the_lock)
    monkeypatch.setitem(globals(), "ANSWER_WAIT_S", 0.5)
    with pytest.raises(AssertionError, match="no answer"):
        test_commands_are_answered_while_a_start_stands_still(world)


def test_what_is_shown_is_shown_while_the_store_stands_still_and_the_newest_is_stored_last(
    world: World,
) -> None:
    loop = world.loop
    with world.standing(world.store_gate, lambda: world.scale({"decode": 3}, {})):
        second = threading.Thread(target=lambda: world.scale({"decode": 4}, {}), daemon=True)
        second.start()
        assert answer(loop.services) == []
        assert answer(lambda: loop.events(0, 0, 0.0))[2] == []
    second.join(GATE_WAIT_S)
    assert world.wanted()["decode"] == 4


def test_a_worker_that_was_named_while_a_drain_stands_still_changes_its_role_after_it(
    world: World,
) -> None:
    services = world.services
    world.step_until_ready()
    assert world.scale({"prefill": 0}, {}) == Taken()
    with world.standing(services.gate, world.step):
        assert answer(lambda: world.scale({}, {"decode-0": "prefill"})) == Taken()
    assert world.stored[-1].desired.leaving == {"decode-0": "prefill"}
    world.step()
    assert services.seen["decode-0"].state == "draining"

    # And when all of it is over, then nothing of it is stored
    for name in ("prefill-0", "decode-0"):
        services.put(name, "ended")
    for _ in range(3):
        world.step()
    assert world.stored[-1].desired.leaving == {}
    assert world.stored[-1].revisions.keys() == services.seen.keys() == {"decode-1", "prefill-0"}


def test_an_update_while_a_start_stands_still_replaces_that_worker_too(world: World) -> None:
    config = SluiceConfig.model_validate({"model": {"model": "b"}, "deploy": {"decode": 2}})
    with world.standing(world.services.gate, world.step):
        assert answer(lambda: world.orders.apply(config)) == Taken()
    assert set(world.services.revisions.values()) == {"a"}
    for _ in range(12):
        for name, seen in list(world.services.seen.items()):
            world.services.put(name, "ended" if seen.state == "draining" else "ready")
        world.step()
    assert set(world.services.revisions.values()) == {"b"}
    assert sorted(row.role for row in world.loop.services()) == ["decode", "decode", "prefill"]


def test_a_halt_waits_for_what_is_under_way_and_then_nothing_is_started(world: World) -> None:
    halted: list[bool] = []
    halts = threading.Thread(target=lambda: halted.append(world.loop.halt()), daemon=True)
    with world.standing(world.services.gate, world.step):
        halts.start()
        assert answer(world.loop.services) == []
        assert halts.is_alive(), "what is started after it is found by nobody"
    halts.join(GATE_WAIT_S)
    assert halted == [True]
    world.services.is_halted = True
    world.services.nameless = ["decode-9"]
    there = dict(world.services.seen)
    world.scale({"decode": 3}, {})
    assert not world.loop.step(0.0)
    assert world.services.seen == there


def test_a_halt_that_meets_an_action_that_hangs_says_so_and_that_action_is_the_last(
    world: World,
) -> None:
    steps: list[bool] = []
    with world.standing(world.services.gate, lambda: steps.append(world.loop.step(0.0))):
        assert not answer(lambda: world.loop.halt(0.05))
    assert steps == [False]
    assert len(world.services.seen) == 1, "of three that were to be started"
    assert not world.loop.step(0.0)
    assert answer(world.loop.halt)


def test_a_halt_amid_those_that_wait_for_their_names_lets_no_other_be_started(
    world: World,
) -> None:
    world.services.nameless = ["decode-7", "decode-8"]
    with world.standing(world.services.gate, world.step):
        assert not answer(lambda: world.loop.halt(0.05))
    assert world.services.claimed == ["decode-7"]
    assert world.services.seen == {}


def test_progress_is_each_call_that_is_done_not_each_step(world: World) -> None:
    """One step may start many workers, each of which may take long."""
    with world.standing(world.services.gate, world.step):
        hanging = world.loop.progress
        assert world.loop.progress == hanging
    assert world.loop.progress >= hanging + 3, "three are started in this step"
    before = world.loop.progress
    world.step()
    assert world.loop.progress > before, "a step with nothing to do gets on, too"


def test_what_the_acting_thread_stores_is_progress_and_what_a_command_stores_is_none(
    world: World,
) -> None:
    """Or whoever tells a hanging controller something again and again keeps it hanging."""
    world.step_until_ready()
    before = world.loop.progress
    world.scale({"decode": 3}, {})
    assert world.loop.progress == before
    with world.standing(world.store_gate, world.step):
        before = world.loop.progress
    assert world.loop.progress >= before + 2, "it has stored the name, and then started"


def test_of_many_who_store_at_once_nobody_waits_for_more_than_two_puts(world: World) -> None:
    """Or an acting thread behind some commands would seem to hang while each of them gets on."""
    num_before = len(world.stored)
    commands = [
        threading.Thread(target=lambda n=n: world.scale({"decode": n}, {}), daemon=True)
        for n in range(3, 8)
    ]
    with world.standing(world.store_gate, lambda: world.scale({"prefill": 2}, {})):
        for command in commands:
            command.start()
        wait_until(
            lambda: world.orders.wanted.desired.generation == 1 + len(commands),
            "all of them are wanted",
        )
    for command in commands:
        command.join(GATE_WAIT_S)
    assert len(world.stored) == num_before + 2
    assert world.stored[-1].desired == world.orders.wanted.desired


def test_who_is_given_up_is_told_after_what_it_died_of(world: World) -> None:
    world.step()
    world.services.put("decode-0", "refused")
    world.services.events.append(ProcessDied("decode-1", "lost"))
    world.step()
    events = world.loop.events(0, 0, 0.0)[2]
    assert events == [ProcessDied("decode-1", "lost"), GaveUp("decode-0", "its config cannot work")]
    assert Row("decode-0", "decode", "refused", "a") in world.loop.services()


def test_only_a_death_that_nobody_ordered_is_a_warning(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    world.step()
    for name in ("decode-0", "decode-1"):
        world.services.put(name, "ready")
    world.services.seen["decode-0"] = replace(world.services.seen["decode-0"], silence_s=9999.0)
    world.step()
    world.services.events += [ProcessDied("decode-0", "killed"), ProcessDied("decode-1", "lost")]
    with caplog.at_level(logging.INFO, logger="deploy.supervision.control_loop"):
        world.step()
    levels = {r.getMessage(): r.levelname for r in caplog.records if "died" in r.getMessage()}
    assert levels == {
        "event=died service=decode-0 reason=killed": "INFO",
        "event=died service=decode-1 reason=lost": "WARNING",
    }


def test_as_many_deaths_are_told_as_the_service_is_given_up_by() -> None:
    """It serves between them, though never for ``deploy.healthy_after_s``."""
    limits = DeployConfig(max_restarts=2, restart_backoff_max_s=1e-6)
    world = World(OnePlan(limits))
    world.step()
    services = world.services
    for _ in range(3):
        services.put("decode-0", "ready")
        world.step()
        services.put("decode-0", "dead")
        services.events.append(ProcessDied("decode-0", "SIGSEGV"))
        world.step()
        world.step()
    told = [word.trouble[0].partition(":")[0] for word in services.told if word.trouble]
    assert list(dict.fromkeys(told)) == [
        "decode-0 died and is started anew",
        "decode-0 died 2 times in a row and is started anew",
        "decode-0 stays down",
    ]
    assert services.told[-1].trouble == ("decode-0 stays down: it died 3 times in a row: SIGSEGV",)


@pytest.mark.parametrize(
    "told",
    [ServiceEnded("decode-0", None), ProcessStarted("decode-0", LIFE)],
    ids=["ended-first", "lives-again"],
)
def test_a_kill_that_met_no_life_hides_no_later_crash(
    told: Event, world: World, caplog: pytest.LogCaptureFixture
) -> None:
    world.step()
    world.services.seen["decode-0"] = replace(
        world.services.seen["decode-0"], state="ready", silence_s=9999.0
    )
    world.step()
    world.services.seen["decode-0"] = replace(world.services.seen["decode-0"], silence_s=0.0)
    world.services.events += [told, ProcessDied("decode-0", "SIGSEGV")]
    with caplog.at_level(logging.INFO, logger="deploy.supervision.control_loop"):
        world.step()
    assert [r.levelname for r in caplog.records if "died" in r.getMessage()] == ["WARNING"]
