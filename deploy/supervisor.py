"""Starts the services of a deployment under Ray, tells what happens to them, and stops them."""

import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from queue import Empty
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from core.config import DeployConfig
from core.errors import ConfigError, SluiceError
from deploy.actors import ProcessIdentity, RemoteServiceActor, Service
from deploy.bounded import run_bounded
from deploy.events import (
    Event,
    EventQueue,
    GaveUp,
    ProcessDied,
    ProcessStarted,
    ServiceEnded,
    StopRequested,
)
from deploy.placement import Bundle

log = logging.getLogger(__name__)

KILL_RESERVE_S = 5.0
REMOVE_TIMEOUT_S = 2.0
"""Of the stop timeout: for killing what did not stop, and for ending Ray."""


@dataclass(frozen=True, slots=True)
class Launch:
    """One service and the surroundings of its process."""

    service: Service
    bundle: Bundle
    environment: Mapping[str, str]
    """Set before the process imports anything."""


class Supervisor:
    """The actors of one deployment, from start to stop.

    All that happens to them arrives in ``events``. Ray's callbacks run on its threads and only
    put events; all else is done by the thread that calls the methods.
    """

    def __init__(self, config: DeployConfig, events: EventQueue) -> None:
        self._config = config
        self._events = events
        self._actors: dict[str, Any] = {}
        self._group: PlacementGroup | None = None
        self._restarts: dict[str, int] = {}
        self._running: set[str] = set()

    def start(self, launches: list[Launch]) -> None:
        """Place all services and start them; returns before they are ready.

        Raises:
            ConfigError: the cluster has no room within ``start_timeout_s``.
        """
        demand = [dict(launch.bundle.resources) for launch in launches]
        group = self._group = placement_group(demand)
        if not group.wait(self._config.start_timeout_s):
            raise ConfigError(
                f"the Ray cluster has no room for {demand} after "
                f"{self._config.start_timeout_s:.0f} s: it has {ray.available_resources()}"
            )
        for index, launch in enumerate(launches):
            self._start_one(launch, PlacementGroupSchedulingStrategy(group, index))

    def _start_one(self, launch: Launch, strategy: PlacementGroupSchedulingStrategy) -> None:
        name = launch.service.name
        self._actors[name] = RemoteServiceActor.options(
            name=name,
            namespace=f"sluice-{ray.get_runtime_context().get_job_id()}",
            num_cpus=launch.bundle.num_cpus,
            num_gpus=launch.bundle.num_gpus,
            max_restarts=self._config.max_restarts,
            scheduling_strategy=strategy,
            runtime_env={"env_vars": dict(launch.environment)},
        ).remote(launch.service)
        self._restarts[name] = 0
        self._watch_start(name)

    def next_event(self, timeout_s: float | None = None) -> Event | None:
        """Return the next event, logged and followed up; None after ``timeout_s`` without one.

        Raises:
            ConfigError: a service met an error that no restart can mend.
            SluiceError: the router is gone for good.
        """
        try:
            event = self._events.get(timeout=timeout_s)
        except Empty:
            return None
        self._follow_up(event)
        return event

    def _follow_up(self, event: Event) -> None:
        match event:
            case ProcessStarted(name, identity):
                if self._restarts[name]:
                    log.warning("service=%s restarted pid=%d", name, identity.pid)
                self._running.add(name)
                self._watch_end(name)
            case ProcessDied(name, reason):
                self._running.discard(name)
                self._restarts[name] += 1
                log.warning(
                    "service=%s died (%s), restart=%d of max_restarts=%d",
                    name, reason, self._restarts[name], self._config.max_restarts,
                )  # fmt: skip
                self._watch_start(name)
            case ServiceEnded(name, error):
                self._running.discard(name)
                del self._actors[name]
                if error is not None:
                    raise ConfigError(f"{name}: {error}")
            case GaveUp(name, reason):
                del self._actors[name]
                log.error("service=%s stays down: %s", name, reason)
                if name == "router" or not self._actors.keys() - {"router"}:
                    raise SluiceError(f"{name} stays down: {reason}")
            case StopRequested():
                pass

    def _watch_start(self, name: str) -> None:
        # Retried by Ray until the restarted process answers.
        call = self._actors[name].identity.options(max_task_retries=-1).remote()

        def tell(identity: ProcessIdentity) -> Event:
            return ProcessStarted(name, identity)

        self._on_result(call, tell, lambda reason: GaveUp(name, reason))

    def _watch_end(self, name: str) -> None:
        call = self._actors[name].ended.remote()

        def tell(error: str | None) -> Event:
            return ServiceEnded(name, error)

        self._on_result(call, tell, lambda reason: ProcessDied(name, reason))

    def _on_result(
        self,
        call: ray.ObjectRef[Any],
        on_result: Callable[[Any], Event],
        on_loss: Callable[[str], Event],
    ) -> None:
        def put(future: Future[Any]) -> None:
            error = future.exception()
            if error is None:
                self._events.put(on_result(future.result()))
            elif isinstance(error, RayError):
                self._events.put(on_loss(_first_line(error)))

        call.future().add_done_callback(put)

    def stop(self) -> None:
        """Stop all services, the unwilling ones by SIGKILL. Never raises for a dead actor."""
        for name in self._running:
            self._actors[name].expect_stop.remote()
        grace_s = max(self._config.stop_timeout_s - KILL_RESERVE_S, 1.0)
        deadline = time.monotonic() + grace_s
        # The router first: it ends what is pending, and does not take the workers' end for a loss.
        self._stop_some(self._running & {"router"}, deadline - grace_s / 2)
        self._stop_some(set(self._running), deadline)
        if not run_bounded(self._remove_all, timeout_s=REMOVE_TIMEOUT_S):
            log.warning("Ray does not answer; what it has started is killed with it")

    def _remove_all(self) -> None:
        for actor in self._actors.values():
            ray.kill(actor, no_restart=True)
        self._actors.clear()
        if self._group is not None:
            remove_placement_group(self._group)
            self._group = None

    def _stop_some(self, names: set[str], deadline: float) -> None:
        for name in names:
            self._actors[name].stop.remote()
        while names and (left_s := deadline - time.monotonic()) > 0:
            try:
                event = self._events.get(timeout=left_s)
            except Empty:
                break
            if isinstance(event, ServiceEnded | ProcessDied | GaveUp):
                names.discard(event.name)
                self._running.discard(event.name)
        for name in names:
            self._running.discard(name)
            log.warning("service=%s did not stop in time, it is killed", name)


def _first_line(error: RayError) -> str:
    if isinstance(error, ActorUnavailableError):
        return "its process is gone"
    for line in str(error).splitlines():
        if line.strip():
            return line.strip()[:200]
    return type(error).__name__
