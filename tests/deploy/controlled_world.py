"""A control loop over services and a store that stand still when they are told to."""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from core.config import DeployConfig, SluiceConfig
from core.messages import DesiredWorkers, Party, Role
from deploy.supervision.control_loop import ControlLoop
from deploy.supervision.desired import Observed, State
from deploy.supervision.events import (
    Event,
)
from deploy.supervision.launch import Launch
from deploy.supervision.orders import Orders
from deploy.supervision.outcome import Outcome
from deploy.supervision.placement import Bundle
from deploy.supervision.wanted import Wanted, first_wanted

GATE_WAIT_S = 60.0


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

    def advice(self, _replicas: Mapping[Party, int]) -> str:
        return ""

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
        self.begin()

    def begin(self) -> None:
        """Let another controller go on with what was stored last."""
        self.orders = Orders(self.stored[-1], self._put)
        self.loop = ControlLoop(self.orders, self.services)

    def scale(self, counts: Mapping[Role, int], roles: Mapping[str, Role]) -> Outcome:
        return self.orders.scale(counts, roles, self.loop.observed)

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

    def step_until_ready(self) -> None:
        """Start what is wanted, and let all that is there be ready."""
        self.step()
        for name in list(self.services.seen):
            self.services.put(name, "ready")

    def wanted(self) -> dict[str, int]:
        """Return the numbers that the next controller would find."""
        targets = self.stored[-1].desired.targets
        return {role: target.replicas for role, target in targets.items()}
