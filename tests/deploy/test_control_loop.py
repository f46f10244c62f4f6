"""A call into Ray that is answered late keeps no command waiting, and nothing wanted is lost by it.

The failures guarded against: ``sluice scale`` and ``sluice status`` that time out while the
controller starts a worker, a service that nobody finds again since it was started before its name
was stored, and a change that is overwritten by what was wanted before it.
"""

import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TypeVar

import pytest

from core.config import DeployConfig, SluiceConfig
from core.messages import DesiredWorkers, Party
from deploy.supervision.control_loop import ControlLoop, Row
from deploy.supervision.desired import Observed, State
from deploy.supervision.events import (
    Event,
    GaveUp,
    ProcessDied,
    ProcessIdentity,
    ProcessStarted,
    ServiceEnded,
)
from deploy.supervision.launch import Launch
from deploy.supervision.outcome import Refused, Taken, Unchanged
from deploy.supervision.placement import Bundle
from deploy.supervision.wanted import Wanted, first_wanted
from tests.deploy.ray_cluster import wait_until

ANSWER_WAIT_S = 20.0
"""An answer that waits for the services does not come at all: they stand still meanwhile."""
GATE_WAIT_S = 60.0
LIFE = ProcessIdentity(1, "here", "decode-0", "decode", "a")
T = TypeVar("T")


@dataclass(frozen=True)
class OnePlan:
    """Decode workers of any revision; nothing of it is ever run."""

    deploy: DeployConfig = field(default_factory=DeployConfig)
    revision_of_all: str = "a"
    log_level: str = "info"
    log_format: str = "text"
    environment: Mapping[str, str] = field(default_factory=dict[str, str])

    def replicas(self) -> dict[Party, int]:
        return {"prefill": 1, "decode": 2}

    def revision(self, _role: Party) -> str:
        return self.revision_of_all

    def launch(self, _role: Party, name: str) -> Launch:
        return Launch(name, Bundle({}), {})

    def updated(self, config: SluiceConfig) -> "OnePlan":
        return replace(self, revision_of_all=config.model.model)


class Gate:
    """Where a call stands still until it is let through."""

    def __init__(self) -> None:
        self.is_there = threading.Event()
        self._open = threading.Event()
        self._open.set()

    @contextmanager
    def closed(self) -> Iterator[None]:
        self.is_there.clear()
        self._open.clear()
        try:
            yield
        finally:
            self._open.set()

    def pass_through(self) -> None:
        self.is_there.set()
        assert self._open.wait(GATE_WAIT_S), "nobody opens the gate"


class SlowServices:
    """Services that are as they were put, and calls that wait at a gate."""

    def __init__(self, stored: list[Wanted]) -> None:
        self.gate = Gate()
        self._stored = stored
        self.is_halted = False
        self.seen: dict[str, Observed] = {}
        self.told: list[DesiredWorkers] = []
        self.events: list[Event] = []
        self.num_calls = 0
        self.nameless: list[str] = []
        self.claimed: list[str] = []

    @property
    def revisions(self) -> dict[str, str]:
        return {name: seen.revision for name, seen in self.seen.items()}

    def observe(self, _wait_s: float, desired: DesiredWorkers) -> dict[str, Observed]:
        self.told.append(desired)
        self.num_calls += 1
        return dict(self.seen)

    def take_events(self) -> list[Event]:
        events, self.events = self.events, []
        return events

    def start(self, name: str, role: Party, revision: str, _launch: Launch) -> None:
        assert self._stored[-1].revisions[name] == revision, "a new controller would miss it"
        self.gate.pass_through()
        self.seen[name] = Observed(name, role, revision, "pending")
        self.num_calls += 1

    def claim_name(self, name: str) -> None:
        assert not self.is_halted, "what is started now is found by nobody"
        self.gate.pass_through()
        self.claimed.append(name)

    def drain(self, name: str) -> None:
        self.gate.pass_through()
        self.put(name, "draining")

    def kill(self, name: str) -> None:
        self.put(name, "dead")

    def forget(self, name: str) -> None:
        del self.seen[name]

    def put(self, name: str, state: State) -> None:
        self.seen[name] = replace(self.seen[name], state=state)


class World:
    """A control loop over slow services and a slow store."""

    def __init__(self, plan: OnePlan | None = None) -> None:
        self.stored: list[Wanted] = [first_wanted(plan or OnePlan())]
        self.store_gate = Gate()
        self.services = SlowServices(self.stored)
        self.loop = ControlLoop(self.stored[0], self.services, self._put)

    def _put(self, wanted: Wanted) -> None:
        self.store_gate.pass_through()
        self.stored.append(wanted)

    @contextmanager
    def standing(self, gate: Gate, call: Callable[[], object]) -> Iterator[None]:
        """Have ``call`` stand still at ``gate`` during the block, and come to its end after it."""
        with gate.closed():
            thread = threading.Thread(target=call, daemon=True)
            thread.start()
            assert gate.is_there.wait(GATE_WAIT_S)
            yield
        thread.join(GATE_WAIT_S)
        assert not thread.is_alive()

    def step(self) -> None:
        self.loop.step(0.0)

    def wanted(self) -> dict[str, int]:
        """Return the numbers that the next controller would find."""
        targets = self.stored[-1].desired.targets
        return {role: target.replicas for role, target in targets.items()}


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
        assert answer(lambda: loop.scale({"decode": 3}, {})) == Taken()
        assert world.wanted() == {"prefill": 1, "decode": 3}
        assert answer(loop.services) == []
        assert answer(lambda: loop.events(0, 0, 0.0))[1:] == (0, [])
        assert "decode=0" in str(answer(lambda: loop.scale({"decode": 0}, {})))

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
        with self._lock:
            return carry_out(self, *arguments)

    monkeypatch.setattr(ControlLoop, "_carry_out", under_the_lock)
    monkeypatch.setitem(globals(), "ANSWER_WAIT_S", 0.5)
    with pytest.raises(AssertionError, match="no answer"):
        test_commands_are_answered_while_a_start_stands_still(world)


def test_what_is_shown_is_shown_while_the_store_stands_still_and_the_newest_is_stored_last(
    world: World,
) -> None:
    loop = world.loop
    with world.standing(world.store_gate, lambda: loop.scale({"decode": 3}, {})):
        second = threading.Thread(target=lambda: loop.scale({"decode": 4}, {}), daemon=True)
        second.start()
        assert answer(loop.services) == []
        assert answer(lambda: loop.events(0, 0, 0.0))[2] == []
    second.join(GATE_WAIT_S)
    assert world.wanted()["decode"] == 4


def test_a_worker_that_was_named_while_a_drain_stands_still_changes_its_role_after_it(
    world: World,
) -> None:
    loop, services = world.loop, world.services
    world.step()
    for name in list(services.seen):
        services.put(name, "ready")
    assert loop.scale({"prefill": 0}, {}) == Taken()
    with world.standing(services.gate, world.step):
        assert answer(lambda: loop.scale({}, {"decode-0": "prefill"})) == Taken()
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
        assert answer(lambda: world.loop.apply(config)) == Taken()
    assert set(world.services.revisions.values()) == {"a"}
    for _ in range(12):
        for name, seen in list(world.services.seen.items()):
            world.services.put(name, "ended" if seen.state == "draining" else "ready")
        world.step()
    assert set(world.services.revisions.values()) == {"b"}
    assert sorted(row.role for row in world.loop.services()) == ["decode", "decode", "prefill"]


def config_of(model: str) -> SluiceConfig:
    return SluiceConfig.model_validate({"model": {"model": model}})


def all_serve(world: World) -> None:
    """Let all who are wanted be ready by what is wanted, and no other be there."""
    for _ in range(12):
        world.step()
        for name, seen in list(world.services.seen.items()):
            world.services.put(name, "ended" if seen.state == "draining" else "ready")
    world.step()


def test_an_update_that_is_taken_back_is_the_config_before_with_the_numbers_of_now(
    world: World,
) -> None:
    loop = world.loop
    all_serve(world)
    assert "nothing to take back" in str(loop.undo())
    assert loop.update(config_of("a")) == Unchanged()
    assert isinstance(loop.undo(), Refused), "that update changed nothing"
    assert loop.update(config_of("b")) == Taken()
    assert loop.scale({"decode": 3}, {}) == Taken()
    assert loop.update(config_of("b")) == Unchanged()

    # When it is taken back, and again, then it goes back and forth; by a later controller, too
    for again, revision in enumerate(("a", "b", "a")):
        all_serve(world)
        loop = world.loop = ControlLoop(world.stored[-1], world.services, world._put)
        assert loop.undo() == Taken()
        assert world.wanted() == {"prefill": 1, "decode": 3}
        told = world.stored[-1]
        assert {target.revision for target in told.desired.targets.values()} == {revision}
        assert told.plan == OnePlan(revision_of_all=revision)
        assert told.desired.generation == 3 + again


def test_what_no_worker_has_served_by_is_not_gone_back_to(world: World) -> None:
    """Two bad updates one after the other would otherwise be all that is gone back and forth to.

    And an undo that is told twice, since its first answer was lost, stays what it is.
    """
    loop = world.loop
    all_serve(world)
    assert loop.update(config_of("bad")) == Taken()
    world.step()
    assert loop.update(config_of("worse")) == Taken()
    world.step()
    assert loop.undo() == Taken()
    assert world.stored[-1].plan == OnePlan(revision_of_all="a")
    assert isinstance(loop.undo(), Refused)
    assert world.stored[-1].plan == OnePlan(revision_of_all="a")
    all_serve(world)
    assert loop.update(config_of("b")) == Taken()
    assert loop.undo() == Taken()
    assert world.stored[-1].plan == OnePlan(revision_of_all="a")


def test_the_first_config_is_gone_back_to_though_not_all_have_served_by_it(world: World) -> None:
    assert world.loop.update(config_of("b")) == Taken()
    assert world.loop.undo() == Taken()
    assert world.stored[-1].plan == OnePlan()


def test_what_could_not_be_stored_is_stored_when_it_is_asked_for_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An update called unchanged would otherwise be forgotten with this controller."""

    def fail(_wanted: Wanted) -> None:
        raise RuntimeError("Ray's control service does not answer")

    with monkeypatch.context() as patch:
        patch.setattr(world.loop, "_put", fail)
        with pytest.raises(RuntimeError):
            world.loop.update(config_of("b"))
    assert world.stored[-1].plan == OnePlan()
    world.loop.update(config_of("b"))
    assert world.stored[-1].plan == OnePlan(revision_of_all="b")


def test_a_worker_that_no_update_can_start_is_told_to_all_with_the_reason_until_it_is_taken_back(
    world: World,
) -> None:
    loop, services = world.loop, world.services
    world.step()
    for name in list(services.seen):
        services.put(name, "ready")
    world.step()
    assert loop.update(config_of("b")) == Taken()
    world.step()
    assert services.seen["decode-2"].revision == "b"
    services.put("decode-2", "refused")
    services.events.append(ServiceEnded("decode-2", "cache.num_blocks: none fits"))
    world.step()
    world.step()
    before, after = services.told[-2:]
    assert (before.decode_revision, before.trouble) == ("b", ())
    reason = "its config cannot work: cache.num_blocks: none fits"
    assert after.trouble == (f"decode-2 stays down: {reason}",)
    assert after.edition > before.edition
    assert loop.events(0, 0, 0.0)[2][-1] == GaveUp("decode-2", reason)

    assert loop.undo() == Taken()
    for _ in range(3):
        world.step()
    assert services.seen.keys() == {"decode-0", "decode-1", "prefill-0"}
    assert {seen.state for seen in services.seen.values()} == {"ready"}
    assert (services.told[-1].decode_revision, services.told[-1].trouble) == ("a", ())


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
    world.loop.scale({"decode": 3}, {})
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
    world.step()
    for name in list(world.services.seen):
        world.services.put(name, "ready")
    before = world.loop.progress
    world.loop.scale({"decode": 3}, {})
    assert world.loop.progress == before
    with world.standing(world.store_gate, world.step):
        before = world.loop.progress
    assert world.loop.progress >= before + 2, "it has stored the name, and then started"


def test_of_many_who_store_at_once_nobody_waits_for_more_than_two_puts(world: World) -> None:
    """Or an acting thread behind some commands would seem to hang while each of them gets on."""
    num_before = len(world.stored)
    commands = [
        threading.Thread(target=lambda n=n: world.loop.scale({"decode": n}, {}), daemon=True)
        for n in range(3, 8)
    ]
    with world.standing(world.store_gate, lambda: world.loop.scale({"prefill": 2}, {})):
        for command in commands:
            command.start()
        wait_until(
            lambda: world.loop._desired.generation == 1 + len(commands), "all of them are wanted"
        )
    for command in commands:
        command.join(GATE_WAIT_S)
    assert len(world.stored) == num_before + 2
    assert world.stored[-1].desired == world.loop._desired


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
