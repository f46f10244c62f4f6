"""Makes what there is what is wanted: sees, decides and acts, while commands change what is wanted.

No call into Ray is made under a lock of ``Orders``: one that Ray answers late delays what is done
about the services, and keeps no command and no ``sluice status`` waiting.
"""

import logging
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from core.config import DeployConfig
from core.messages import DesiredWorkers, Party
from deploy.supervision.desired import (
    Action,
    Drain,
    Forget,
    GiveUp,
    Kill,
    Limits,
    Observed,
    Start,
)
from deploy.supervision.event_log import EventLog
from deploy.supervision.events import Event, GaveUp, ProcessDied, ProcessStarted, ServiceEnded
from deploy.supervision.launch import Launch, Plan
from deploy.supervision.orders import Orders
from deploy.supervision.reconciler import Reconciler
from deploy.supervision.trouble import Troubles

log = logging.getLogger(__name__)

HALT_WAIT_S = 60.0
"""Nobody waits longer for a halt: an action that hangs then keeps no thread for its caller."""


class Services(Protocol):
    """What acts on the services: see ``RayServices``. Only the thread that calls ``step`` does."""

    @property
    def revisions(self) -> Mapping[str, str]:
        """By name, of all there are."""
        ...

    @property
    def num_calls(self) -> int:
        """How many calls that may wait for Ray have come back. Any thread may look."""
        ...

    def observe(self, wait_s: float, desired: DesiredWorkers) -> dict[str, Observed]:
        """Return what is seen, after ``wait_s`` or as soon as there is news."""
        ...

    def take_events(self) -> list[Event]:
        """Return what has happened since the last call."""
        ...

    def start(self, name: str, role: Party, revision: str, launch: Launch) -> None:
        """Start one, or start it anew."""
        ...

    @property
    def nameless(self) -> list[str]:
        """Those that are to start, and whose predecessors still had their names at the last try."""
        ...

    def claim_name(self, name: str) -> None:
        """Start one of the ``nameless`` if its name is free by now."""
        ...

    def drain(self, name: str) -> None:
        """Have it finish what it has."""
        ...

    def kill(self, name: str) -> None:
        """End its process now."""
        ...

    def forget(self, name: str) -> None:
        """Free its name."""
        ...


@dataclass(frozen=True, slots=True)
class Row:
    """One service, for people."""

    name: str
    role: str
    state: str
    revision: str


def limits_of(deploy: DeployConfig) -> Limits:
    """Return what the reconciler goes by."""
    return Limits(
        max_restarts=deploy.max_restarts,
        restart_backoff_max_s=deploy.restart_backoff_max_s,
        healthy_after_s=deploy.healthy_after_s,
        start_timeout_s=deploy.start_timeout_s,
        drain_timeout_s=deploy.drain_timeout_s,
        progress_timeout_s=deploy.progress_timeout_s,
        max_surge=deploy.max_surge,
    )


class ControlLoop:
    """One thread calls ``step`` again and again; any thread calls the rest."""

    def __init__(self, orders: Orders, services: Services) -> None:
        self._orders = orders
        self._services = services
        self._events = EventLog()
        self._reconciler = Reconciler(limits_of(orders.wanted.plan.deploy))
        self._troubles = Troubles(time.time())
        """Of the thread that steps, as the above."""
        self._acting = threading.Lock()
        """Held while ``step`` acts."""
        self._is_halted = False
        """Looked at before each action."""
        self._num_kept = 0
        """Of the thread that steps: how often it has seen to it that something is stored."""
        self.observed: Mapping[str, Observed] = {}
        """All services as last seen, by name. Set by the thread that steps; any may look."""

    @property
    def progress(self) -> int:
        """Grows with each call into Ray that the thread that steps gets done. Any thread may look.

        It stands still for two calls at the longest, each of which Ray gives up in time: for a
        start, or for storing something while a command is storing something else.
        """
        return self._services.num_calls + self._num_kept

    def events(self, life: int, start: int, wait_s: float) -> tuple[int, int, list[Event]]:
        """See ``EventLog.read``."""
        return self._events.read(life, start, wait_s)

    def services(self) -> list[Row]:
        """Return all services as last seen."""
        seen = sorted(self.observed.values(), key=lambda seen: seen.name)
        return [Row(each.name, each.role, each.state, each.revision) for each in seen]

    def _keep(self) -> None:
        """Store what is wanted, by the thread that steps."""
        self._orders.store()
        self._num_kept += 1

    def halt(self, wait_s: float = HALT_WAIT_S) -> bool:
        """Have ``step`` begin nothing more.

        Returns:
            True as soon as nothing is under way: what has been started by then is all. False after
            ``wait_s``: one action hangs, and may still start what it is about; it is the last.
        """
        self._is_halted = True
        if not self._acting.acquire(timeout=wait_s):
            return False
        self._acting.release()
        return True

    def step(self, wait_s: float) -> bool:
        """See what there is, for ``wait_s`` at most, and do what is due.

        Returns:
            False after ``halt``, which may have come amid it: nothing more is begun.
        """
        observed = self._services.observe(wait_s, self._word())
        with self._acting:
            if not self._is_halted:
                self._act(observed)
            return not self._is_halted

    def _word(self) -> DesiredWorkers:
        """Return what the services are told."""
        edition, trouble = self._troubles.told(time.time())
        return self._orders.wanted.desired.word(edition, trouble)

    def _act(self, observed: dict[str, Observed]) -> None:
        for name in self._services.nameless:
            if self._is_halted:
                return
            self._services.claim_name(name)
        happened = [self._hear(event) for event in self._services.take_events()]
        self._troubles.see(time.monotonic(), observed)
        self.observed = observed
        wanted = self._orders.wanted
        plan = wanted.plan
        self._reconciler.limit(limits_of(plan.deploy))
        actions = self._reconciler.decide(time.monotonic(), wanted.desired, observed)
        if starts := {each.name: each.revision for each in actions if isinstance(each, Start)}:
            self._orders.note_starts(starts)
        is_served = wanted.desired.is_served(observed.values())
        if (is_served and self._orders.note_served(plan)) or starts:
            # Before they exist: a controller that dies in between looks for them by their names.
            self._keep()
        given_up = list(self._carry_out_all(actions, plan))
        # After the acting, which may have started anew what these events tell of.
        self._events.append([*happened, *given_up])
        if self._orders.note_there(self._services.revisions, observed):
            self._keep()

    def _carry_out_all(self, actions: Iterable[Action], plan: Plan) -> Iterator[Event]:
        for action in actions:
            if self._is_halted:
                return
            if event := self._carry_out(action, plan):
                yield event

    def _carry_out(self, action: Action, plan: Plan) -> Event | None:
        match action:
            case Start(name, role, revision):
                log.info("event=start service=%s revision=%s", name, revision)
                self._troubles.start(action)
                self._services.start(name, role, revision, plan.launch(role, name))
            case Drain(name):
                log.info("event=drain service=%s", name)
                self._services.drain(name)
            case Kill(name, reason):
                log.warning("event=kill service=%s reason=%s", name, reason)
                self._troubles.order(action)
                self._services.kill(name)
            case Forget(name):
                log.info("event=over service=%s", name)
                self._troubles.forget(name)
                self._services.forget(name)
            case GiveUp(name, reason):
                return self._hear(GaveUp(name, reason))
        return None

    def _hear(self, event: Event) -> Event:
        """Log what has happened, and return it with why."""
        match event:
            case ProcessDied(name, reason):
                level = logging.INFO if self._troubles.is_ordered(name) else logging.WARNING
                log.log(level, "event=died service=%s reason=%s", name, reason)
            case ProcessStarted(name, identity):
                log.info("event=up service=%s pid=%d", name, identity.pid)
            case ServiceEnded(name, str(error)):
                log.error("event=refused service=%s reason=%s", name, error)
            case _:
                pass
        told = self._troubles.hear(event)
        if isinstance(told, GaveUp):
            log.error("event=stays_down service=%s reason=%s", told.name, told.reason)
        return told
