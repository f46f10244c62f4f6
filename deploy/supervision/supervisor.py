"""The driver's side of a deployment: starts its controller, tells what happens, and stops all."""

import logging
import threading
from collections.abc import Callable
from queue import Empty
from typing import Any, TypeVar

import ray
from ray.actor import ActorHandle
from ray.exceptions import ActorUnavailableError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from core.config import SluiceConfig
from core.errors import ConfigError, SluiceError
from deploy.cluster.bounded import run_bounded
from deploy.cluster.ray_errors import last_line
from deploy.supervision import controller, wanted
from deploy.supervision.answers import STOP_LOOK_S, answer_of
from deploy.supervision.control_loop import Row
from deploy.supervision.controller import RemoteController
from deploy.supervision.events import Event, EventQueue, GaveUp, ServiceEnded, StopRequested
from deploy.supervision.launch import Plan
from deploy.supervision.lookup import find, find_controller, namespace_of, services_of
from deploy.supervision.outcome import Refused
from deploy.supervision.sentinel import RemoteSentinel
from deploy.supervision.service_names import role_of
from deploy.supervision.shortage import shortage
from deploy.supervision.stopping import stop_all
from deploy.supervision.wanted import Beginning, first_wanted

log = logging.getLogger(__name__)

T = TypeVar("T")

KILL_RESERVE_S = 5.0
"""Of the stop timeout: for killing what did not stop, and for ending Ray."""
REMOVE_TIMEOUT_S = 2.0
"""Beyond the rest of the stop timeout: for killing what is left by then."""
RECALL_TIMEOUT_S = 1.0
"""For what Ray has stored; the driver goes on without it."""
EVENTS_WAIT_S = 5.0
"""After so long the controller answers though nothing has happened."""
CALL_TIMEOUT_S = 5.0
LEFT_BEHIND_WAIT_S = 5.0
"""For the services of an earlier deployment to end with it."""


class Supervisor:
    """One deployment, from start to stop.

    All that happens to it arrives in ``events``: a thread that waits for the controller puts them
    there; all else is done by the thread that calls the methods.
    """

    def __init__(
        self,
        plan: Plan,
        events: EventQueue,
        *,
        private: bool,
        is_stop_asked: Callable[[], bool] = lambda: False,
    ) -> None:
        """Start nothing yet.

        Args:
            plan: Of the deployment.
            events: Where what happens to it is put.
            private: Whether its Ray session is its own.
            is_stop_asked: Ends the waits for the controller's answers.
        """
        self._is_stop_asked = is_stop_asked
        self._plan = plan
        """As it was at the start: see ``_plan_now``."""
        self._events = events
        self._private = private
        self._namespace = namespace_of(plan.deploy.name)
        self._controller: Any = None
        self._sentinel: ActorHandle[Any] | None = None
        self._stopping = threading.Event()
        self._listener: threading.Thread | None = None
        self._tolerates_failures = False

    def resume(self) -> bool:
        """Take over a detached deployment of this name, and return whether there is one.

        One whose controller is gone for good gets a new one.
        """
        self._controller = find_controller(self._namespace)
        is_orphaned = self._controller is None and wanted.is_stored(self._namespace)
        if is_orphaned and not self._claim(Beginning(None)):
            self._controller = find_controller(self._namespace)
        if self._controller is not None:
            self._hear()
        return self._controller is not None

    def start(self) -> None:
        """Start the controller, which starts all else; returns before anything is ready.

        Raises:
            ConfigError: a deployment of this name runs on the cluster already, or its services do
                though its controller is gone.
        """
        name = self._plan.deploy.name
        if not self._private and self._plan.deploy.lifetime == "job":
            # Where the driver is: what ends that machine ends the driver, too.
            self._sentinel = RemoteSentinel.options(scheduling_strategy=_here(soft=False)).remote()
        taken = ConfigError(
            f"deploy.name={name!r}: a deployment of this name runs on this cluster; stop it with "
            f"sluice down --name {name}, or give another name"
        )
        if find_controller(self._namespace) is not None:
            raise taken
        left = _left_behind(self._namespace)
        # Looked for again: they may be those of a start that was faster, which the claim tells.
        if left and find_controller(self._namespace) is None:
            raise ConfigError(
                f"deploy.name={name!r}: {', '.join(left)} of an earlier deployment still run, "
                f"without a controller; run sluice down --name {name} first"
            )
        if not self._claim(Beginning(first_wanted(self._plan))):
            raise taken
        self._hear()

    def _claim(self, beginning: Beginning) -> bool:
        """Start the controller; return False if another start has taken its name meanwhile."""
        try:
            self._controller = RemoteController.options(
                name=controller.NAME,
                namespace=self._namespace,
                runtime_env={"env_vars": dict(self._plan.environment)},
                lifetime="detached",
                # Beside the router: on a host that is cut off it would take all others for dead.
                scheduling_strategy=_here(soft=True),
                memory=1,  # Ray places anywhere what asks for nothing, whatever it is told
            ).remote(self._namespace, self._sentinel, beginning)
        except ValueError:
            log.debug("event=name_taken namespace=%s", self._namespace)
            return False
        return True

    def _hear(self) -> None:
        self._listener = threading.Thread(
            target=self._listen, name="controller-events", daemon=True
        )
        self._listener.start()

    def _listen(self) -> None:
        life, start = 0, 0
        is_there = False
        while not self._stopping.is_set():
            try:
                call = self._controller.events.remote(life, start, EVENTS_WAIT_S)
                self._wait_answer(call, is_there=is_there)
                if self._stopping.is_set():
                    return
                life, start, events = ray.get(call)
                is_there = True
            except ActorUnavailableError as error:
                log.debug("event=controller_away reason=%s", error)
                is_there = False
                self._stopping.wait(1.0)
                continue
            except RayError as error:
                # Ray starts it anew after any death but one in its constructor.
                if not self._stopping.is_set():
                    self._events.put(self._end_of_controller(error))
                return
            for event in events:
                self._events.put(event)

    def _wait_answer(self, call: ray.ObjectRef[Any], *, is_there: bool) -> None:
        """Wait for the controller, or for the stop; one that answered before and froze is ended.

        Ray starts it anew, among the same services. Silence counts only while this process listens.
        """
        limit_s: float | None = None
        num_looks = 0
        while not ray.wait([call], timeout=STOP_LOOK_S)[0] and not self._stopping.is_set():
            num_looks += 1
            silence_s = num_looks * STOP_LOOK_S
            if not is_there or silence_s <= EVENTS_WAIT_S:
                continue
            if limit_s is None:
                # Once is enough: nobody but the silent controller changes the plan.
                limit_s = EVENTS_WAIT_S + self._plan_now().deploy.progress_timeout_s
            if silence_s >= limit_s:
                log.warning("event=kill service=controller reason=no answer for %.0f s", silence_s)
                self._end_life()
                num_looks = 0  # as long again, should this one be lost

    def _end_life(self) -> None:
        """End the controller's process, for Ray to start another."""
        try:
            ray.kill(self._controller, no_restart=False)
        except Exception as error:  # noqa: BLE001 - no reason to hear nothing any more
            log.warning("event=not_killed service=controller reason=%s", error)

    def _end_of_controller(self, error: RayError) -> Event:
        """Tell an end that ``sluice down`` has brought about from one that nobody asked for."""
        controller_id = self._controller._actor_id.hex()  # noqa: SLF001 - no public name
        if _recalled(lambda: wanted.is_forbidden(self._namespace, controller_id)):
            log.info("event=stopped_by_command name=%s", self._plan.deploy.name)
            return StopRequested()
        return GaveUp(controller.NAME, last_line(error))

    def next_event(self, timeout_s: float | None = None) -> Event | None:
        """Return the next event, followed up; None after ``timeout_s`` without one.

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

    def tolerate_failures(self) -> None:
        """Take no worker's failure for the end of the deployment any more.

        Before, such as until it is ready, one whose config cannot work, or that dies again and
        again, ends it.
        """
        self._tolerates_failures = True

    def _follow_up(self, event: Event) -> None:
        match event:
            case ServiceEnded(name, str(error)) if not self._tolerates_failures:
                raise ConfigError(f"{name}: {error}")
            case GaveUp("router" | controller.NAME as name, reason):
                raise SluiceError(f"{name} stays down: {reason}")
            case GaveUp(name, reason) if not self._tolerates_failures:
                raise SluiceError(f"{name} stays down: {reason}")
            case _:
                pass

    def apply(self, config: SluiceConfig) -> str | None:
        """Have the deployment run by ``config``, its numbers of workers too.

        Returns:
            None, or why it cannot be.

        Raises:
            StopInterrupt: a stop was asked for meanwhile.
            SluiceError: the controller does not answer.
        """
        try:
            outcome = self._answer_of(self._controller.apply.remote(config))
        except RayError as error:
            raise SluiceError("the controller does not answer") from error
        return outcome.reason if isinstance(outcome, Refused) else None

    def services(self) -> list[Row]:
        """Return all services as the controller last saw them; none while it does not answer.

        Raises:
            StopInterrupt: a stop was asked for meanwhile.
        """
        try:
            return self._answer_of(self._controller.services.remote())
        except RayError:
            return []

    def _answer_of(self, call: ray.ObjectRef[Any]) -> Any:  # noqa: ANN401 - as ray.get
        return answer_of(call, self._is_stop_asked, timeout_s=CALL_TIMEOUT_S)

    def waits(self) -> str | None:
        """Return in one line what the services that Ray has not placed ask for; None: all are.

        Raises:
            StopInterrupt: a stop was asked for meanwhile.
        """
        pending = [row.name for row in self.services() if row.state == "pending"]
        if self._private or not pending:
            return None
        plan = self._plan_now()
        asked = {name: plan.launch(role_of(name), name).bundle.resources for name in pending}
        asked = {name: room for name, room in asked.items() if any(room.values())}
        if not asked:
            return None
        return shortage(asked, ray.cluster_resources(), ray.available_resources())

    def leave(self) -> None:
        """Listen no more; all goes on."""
        self._stopping.set()
        if self._listener is not None:
            # A call into Ray while it is shut down would end this process by a signal.
            self._listener.join(CALL_TIMEOUT_S)

    def stop(self) -> None:
        """Stop all services, the unwilling ones by SIGKILL. Never raises for a dead actor."""
        self._stopping.set()
        if self._controller is not None:
            grace_s = self._stop_timeout_s() - KILL_RESERVE_S
            if not run_bounded(
                lambda: stop_all(self._namespace, grace_s, of=self._controller),
                timeout_s=grace_s + REMOVE_TIMEOUT_S,
            ):
                log.warning("Ray does not answer; what it has started is killed with it")
        if self._sentinel is not None:
            ray.kill(self._sentinel)

    def _stop_timeout_s(self) -> float:
        return self._plan_now().deploy.stop_timeout_s

    def _plan_now(self) -> Plan:
        """Return the plan as updates have left it; that of the start where Ray does not tell it."""
        stored = _recalled(lambda: wanted.recall(self._namespace))
        return self._plan if stored is None else stored.plan


def _recalled(look: Callable[[], T]) -> T | None:
    """Return what ``look`` finds in Ray's store; None where it fails, or not in time."""
    found: list[T] = []
    try:
        run_bounded(lambda: found.append(look()), timeout_s=RECALL_TIMEOUT_S)
    except Exception as unknown:  # noqa: BLE001 - the driver goes on, whatever Ray does
        log.debug("event=not_recalled reason=%s", unknown)
    return found[0] if found else None


def _here(*, soft: bool) -> NodeAffinitySchedulingStrategy:
    """Place an actor on this machine; ``soft``: on another one where this one is gone."""
    return NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=soft)


def _left_behind(namespace: str) -> list[str]:
    """Return the services in ``namespace`` that still run, though there is no controller.

    Those of a job whose driver has just ended are ending, too: they are given a moment.
    """
    services = services_of(namespace)
    ends = [service.wait_end.remote(LEFT_BEHIND_WAIT_S) for service in services.values()]
    if ends:
        ray.wait(ends, num_returns=len(ends), timeout=LEFT_BEHIND_WAIT_S, fetch_local=False)
    return [name for name in services if find(name, namespace) is not None]
