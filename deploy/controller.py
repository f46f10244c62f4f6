"""The controller of a deployment: an actor that keeps what there is as it is wanted.

It touches no traffic. When its process dies, Ray starts it anew; it reads what is wanted, and who
was started, from Ray's internal key-value store, finds the services by name, and goes on.
"""

import logging
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import ray
from ray.actor import ActorHandle

from core.channel import Party
from core.config import DeployConfig, SluiceConfig
from core.errors import ConfigError
from core.logs import set_up_logging
from core.messages import Role
from core.parent import die_with_parent
from deploy.events import Event, GaveUp, ProcessDied, ProcessStarted, ServiceEnded
from deploy.fleet import Fleet
from deploy.reconciler import (
    Action,
    Desired,
    Drain,
    Forget,
    GiveUp,
    Kill,
    Limits,
    Observed,
    Reconciler,
    Start,
    Target,
)
from deploy.scaling import check_targets, scaled
from deploy.sentinel import outlive_not
from deploy.wanted import First, Wanted, WantedStore, recall

log = logging.getLogger(__name__)

NAME = "controller"
TICK_S = 1.0
MAX_EVENTS = 1000
"""That are kept for the drivers; one that asks too late misses the oldest."""
EXIT_CRASHED = 1


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


@dataclass(frozen=True, slots=True)
class Row:
    """One service, for people."""

    name: str
    role: str
    state: str
    revision: str


class Controller:
    """The shell around ``Reconciler``. One thread acts; Ray's calls change what is wanted."""

    def __init__(
        self,
        namespace: str,
        sentinel: ActorHandle[Any] | None = None,
        first: First | None = None,
    ) -> None:
        die_with_parent()
        self._store = WantedStore(namespace)
        if first is not None:
            self._store.begin(first)
        self._store.count_start()
        wanted = recall(namespace)
        if wanted is None:
            raise RuntimeError("nothing is stored any more: its deployment was stopped meanwhile")
        plan = wanted.plan
        set_up_logging(plan.log_level, worker=NAME, role="deploy", log_format=plan.log_format)
        self._life = secrets.randbits(62)
        self._changed = threading.Condition()
        self._plan, self._desired = wanted.plan, wanted.desired
        self._stored_revisions = dict(wanted.revisions)
        self._fleet = Fleet(namespace, sentinel)
        self._fleet.adopt(wanted.revisions)
        self._reconciler = Reconciler(limits_of(wanted.plan.deploy))
        self._observed: dict[str, Observed] = {}
        self._events: deque[Event] = deque(maxlen=MAX_EVENTS)
        self._num_events = 0
        """That ever were."""
        if sentinel is not None:
            outlive_not(sentinel, self._end)
        threading.Thread(target=self._run, name=NAME, daemon=True).start()

    def __repr__(self) -> str:
        return NAME

    def events(self, life: int, start: int, wait_s: float) -> tuple[int, int, list[Event]]:
        """Return which life of the controller this is, where to go on, and events from ``start``.

        Waits ``wait_s`` for the first. Of another ``life``, all of this one's are returned, the
        latest ``MAX_EVENTS`` at most.
        """
        first = start if life == self._life else 0
        with self._changed:
            self._changed.wait_for(lambda: self._num_events > first, wait_s)
            num_new = min(self._num_events - first, len(self._events))
            events = list(islice(self._events, len(self._events) - num_new, None))
            return self._life, self._num_events, events

    def services(self) -> list[Row]:
        """Return all services as last seen."""
        with self._changed:
            seen = list(self._observed.values())
        return [
            Row(s.name, s.role, s.state, s.revision) for s in sorted(seen, key=lambda s: s.name)
        ]

    def scale(self, counts: Mapping[Role, int], roles: Mapping[str, Role]) -> str | None:
        """Want ``counts`` of the roles, and the named workers in other roles.

        Returns:
            None, or why it cannot be.
        """
        with self._changed:
            try:
                self._want(
                    scaled(self._desired, self._observed, counts, roles, self._plan.revision)
                )
            except ConfigError as error:
                return str(error)
        return None

    def update(self, config: SluiceConfig) -> str | None:
        """Replace all workers, few at a time, by such that run by ``config``.

        Returns:
            None, or why it cannot be.
        """
        with self._changed:
            replicas = {role: target.replicas for role, target in self._desired.targets.items()}
            return self._rebase(config, replicas)

    def apply(self, config: SluiceConfig) -> str | None:
        """As ``update``, and want as many workers as ``config`` says. Without a change, no more.

        Returns:
            None, or why it cannot be.
        """
        with self._changed:
            replicas = {role: target.replicas for role, target in self._desired.targets.items()}
            replicas |= {"prefill": config.deploy.prefill, "decode": config.deploy.decode}
            return self._rebase(config, replicas)

    def _rebase(self, config: SluiceConfig, replicas: Mapping[Party, int]) -> str | None:
        try:
            plan = self._plan.updated(config)
            targets = {role: Target(n, plan.revision(role)) for role, n in replicas.items()}
            check_targets(targets)
        except ConfigError as error:
            return str(error)
        if (plan, targets) != (self._plan, self._desired.targets):
            self._plan = plan
            self._reconciler.limit(limits_of(plan.deploy))
            self._want(Desired(targets, self._desired.leaving, self._desired.generation + 1))
        return None

    def _want(self, desired: Desired) -> None:
        self._desired = desired
        self._remember()
        told = " ".join(f"{role}={target.replicas}" for role, target in desired.targets.items())
        log.info("event=wanted %s leaving=%s", told, ",".join(desired.leaving) or "none")

    def _remember(self) -> None:
        self._stored_revisions = self._fleet.revisions
        self._store.put(Wanted(self._plan, self._desired, self._stored_revisions))

    def _run(self) -> None:
        try:
            self._keep()
        except BaseException:
            log.exception("event=crashed service=%s", NAME)
            logging.shutdown()
            os._exit(EXIT_CRASHED)  # a thread's end would leave an actor that only seems to be one

    def _keep(self) -> None:
        while True:
            observed = self._fleet.observe(TICK_S, self._desired.workers)
            with self._changed:
                self._observed = observed
                for action in self._reconciler.decide(time.monotonic(), self._desired, observed):
                    self._carry_out(action)
                # After the deciding, which may have started anew what these events tell of.
                self._tell()
                leaving = {n: r for n, r in self._desired.leaving.items() if n in observed}
                if leaving != self._desired.leaving:
                    self._desired = replace(self._desired, leaving=leaving)
                    self._remember()
                elif self._fleet.revisions != self._stored_revisions:
                    self._remember()

    def _tell(self) -> None:
        for event in self._fleet.events:
            match event:
                case ProcessDied(name, reason):
                    log.warning("event=died service=%s reason=%s", name, reason)
                case ProcessStarted(name, identity):
                    log.info("event=up service=%s pid=%d", name, identity.pid)
                case GaveUp(name, reason):
                    log.error("event=stays_down service=%s reason=%s", name, reason)
                case ServiceEnded(name, error) if error is not None:
                    log.error("event=refused service=%s reason=%s", name, error)
                case _:
                    pass
        self._events.extend(self._fleet.events)
        self._num_events += len(self._fleet.events)
        self._fleet.events.clear()
        self._changed.notify_all()

    def _carry_out(self, action: Action) -> None:
        match action:
            case Start(name, role, revision):
                # Before it exists: a controller that dies in between looks for it by its name.
                revisions = {**self._fleet.revisions, name: revision}
                self._store.put(Wanted(self._plan, self._desired, revisions))
                log.info("event=start service=%s revision=%s", name, revision)
                self._fleet.start(name, role, revision, self._plan.launch(role, name))
            case Drain(name):
                log.info("event=drain service=%s", name)
                self._fleet.drain(name)
            case Kill(name, reason):
                log.warning("event=kill service=%s reason=%s", name, reason)
                self._fleet.kill(name)
            case Forget(name):
                log.info("event=over service=%s", name)
                self._fleet.forget(name)
            case GiveUp(name, reason):
                self._fleet.events.append(GaveUp(name, reason))

    def _end(self) -> None:
        """For good, though Ray is told to start it anew after a death. No key stays behind."""
        self._store.wipe()
        ray.kill(ray.get_runtime_context().current_actor, no_restart=True)


# Threads: one blocked in ``events`` per watching driver, one for each short call.
RemoteController = ray.remote(num_cpus=0, max_restarts=-1, max_concurrency=8)(Controller)
