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
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import ray
from ray import cloudpickle
from ray.actor import ActorHandle
from ray.experimental.internal_kv import _internal_kv_del, _internal_kv_get, _internal_kv_put

from core.channel import Party
from core.config import DeployConfig, SluiceConfig
from core.errors import ConfigError
from core.logs import set_up_logging
from core.messages import Role
from core.parent import die_with_parent
from deploy.events import Event, GaveUp, ProcessDied, ProcessStarted, ServiceEnded
from deploy.fleet import Fleet
from deploy.launch import Plan
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

log = logging.getLogger(__name__)

NAME = "controller"
TICK_S = 1.0
MAX_EVENTS = 1000
"""That are kept for the drivers; one that asks too late misses the oldest."""
MAX_STARTS = 6
STARTS_WINDOW_S = 60.0
"""More than ``MAX_STARTS`` starts in such a time, and the controller stays down."""
EXIT_CRASHED = 1


@dataclass(frozen=True, slots=True)
class Wanted:
    """All that a new controller must know.

    In the key-value store, which lives as long as Ray's control service: no further process is
    needed that could die as the controller can.
    """

    plan: Plan
    desired: Desired
    revisions: Mapping[str, str]
    """Of the services that were started, by name."""


def first_wanted(plan: Plan) -> Wanted:
    """Return what a deployment of ``plan`` starts with."""
    targets = {role: Target(n, plan.revision(role)) for role, n in plan.replicas().items()}
    return Wanted(plan, Desired(targets), {})


def store(namespace: str, wanted: Wanted) -> None:
    """Keep ``wanted`` for the next controller."""
    _internal_kv_put(b"wanted", cloudpickle.dumps(wanted), namespace=namespace.encode())


def clear(namespace: str) -> None:
    """Forget what was stored.

    But for which start it was: a controller that is not dead yet must not begin it again.
    """
    _internal_kv_del(b"wanted", namespace=namespace.encode())


def is_stored(namespace: str) -> bool:
    """Return whether a deployment was started in ``namespace`` and not stopped."""
    return _internal_kv_get(b"wanted", namespace=namespace.encode()) is not None


def recall(namespace: str) -> Wanted | None:
    """Return what was stored last; None: nothing, since all has been stopped or never began."""
    content = _internal_kv_get(b"wanted", namespace=namespace.encode())
    return None if content is None else cloudpickle.loads(content)


@dataclass(frozen=True, slots=True)
class First:
    """What the controller of a new deployment begins with; one of a later life goes on instead."""

    wanted: Wanted
    start_id: bytes = field(default_factory=lambda: secrets.token_bytes(16))
    """Tells this start from those before it."""


def _begin(namespace: str, first: First) -> None:
    """Store ``first`` unless an earlier life of the controller did.

    By the controller alone, which has its name then: of two starts only one has anything stored.
    """
    if _internal_kv_get(b"start", namespace=namespace.encode()) != first.start_id:
        store(namespace, first.wanted)
        forgive(namespace)
        _internal_kv_put(b"start", first.start_id, namespace=namespace.encode())


def forgive(namespace: str) -> None:
    """Forget how often the controller started lately."""
    _internal_kv_del(b"starts", namespace=namespace.encode())


def _count_start(namespace: str) -> None:
    """Remember one more start; Ray itself would start what crashes at once for ever.

    Raises:
        RuntimeError: there were too many of late. Raised in the constructor, it is what Ray takes
            for an end for good.
    """
    now = time.time()
    content = _internal_kv_get(b"starts", namespace=namespace.encode())
    before: list[float] = [] if content is None else cloudpickle.loads(content)
    starts = [*(start for start in before if now - start < STARTS_WINDOW_S), now]
    if len(starts) > MAX_STARTS:
        raise RuntimeError(f"it crashed {MAX_STARTS} times in {now - starts[0]:.0f} s; see its log")
    _internal_kv_put(b"starts", cloudpickle.dumps(starts), namespace=namespace.encode())


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
        if first is not None:
            _begin(namespace, first)
        _count_start(namespace)
        wanted = recall(namespace)
        if wanted is None:
            raise RuntimeError("nothing is stored any more: its deployment was stopped meanwhile")
        plan = wanted.plan
        set_up_logging(plan.log_level, worker=NAME, role="deploy", log_format=plan.log_format)
        self._life = secrets.randbits(62)
        self._namespace = namespace
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
            self._want(Desired(targets, self._desired.leaving, self._desired.generation + 1))
        return None

    def _want(self, desired: Desired) -> None:
        self._desired = desired
        self._store()
        told = " ".join(f"{role}={target.replicas}" for role, target in desired.targets.items())
        log.info("event=wanted %s leaving=%s", told, ",".join(desired.leaving) or "none")

    def _store(self) -> None:
        self._stored_revisions = self._fleet.revisions
        store(self._namespace, Wanted(self._plan, self._desired, self._stored_revisions))

    def _run(self) -> None:
        try:
            self._keep()
        except BaseException:
            log.exception("event=crashed service=%s", NAME)
            logging.shutdown()
            os._exit(EXIT_CRASHED)  # a thread's end would leave an actor that only seems to be one

    def _keep(self) -> None:
        while True:
            observed = self._fleet.observe(TICK_S)
            with self._changed:
                self._observed = observed
                for action in self._reconciler.decide(time.monotonic(), self._desired, observed):
                    self._carry_out(action)
                # After the deciding, which may have started anew what these events tell of.
                self._tell()
                leaving = {n: r for n, r in self._desired.leaving.items() if n in observed}
                if leaving != self._desired.leaving:
                    self._desired = replace(self._desired, leaving=leaving)
                    self._store()
                elif self._fleet.revisions != self._stored_revisions:
                    self._store()

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
                store(self._namespace, Wanted(self._plan, self._desired, revisions))
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
        """For good, though Ray is told to start it anew after a death."""
        ray.kill(ray.get_runtime_context().current_actor, no_restart=True)


# Threads: one blocked in ``events`` per watching driver, one for each short call.
RemoteController = ray.remote(num_cpus=0, max_restarts=-1, max_concurrency=8)(Controller)
