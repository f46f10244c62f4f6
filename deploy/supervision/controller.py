"""The controller of a deployment: an actor that keeps what there is as it is wanted.

It touches no traffic. When its process dies, Ray starts it anew; it reads what is wanted, and who
was started, from Ray's internal key-value store, finds the services by name, and goes on.
"""

import logging
import os
import threading
from collections.abc import Mapping
from typing import Any

import ray
from ray.actor import ActorHandle

from core.config import SluiceConfig
from core.logs import set_up_logging
from core.messages import Role
from core.parent import die_with_parent
from deploy.supervision.control_loop import ControlLoop, Row
from deploy.supervision.events import Event
from deploy.supervision.orders import Orders
from deploy.supervision.outcome import Outcome
from deploy.supervision.ray_services import RayServices
from deploy.supervision.sentinel import outlive_not
from deploy.supervision.wanted import Beginning, StoppedMeanwhileError, Wanted, WantedStore
from deploy.supervision.watchdog import watch

log = logging.getLogger(__name__)

NAME = "controller"
TICK_S = 1.0
STALL_LIMIT_S = 180.0
"""The thread that acts hangs if it gets nothing done for so long. One thing is at worst two calls
to Ray's control service, each given up after 60 s: a name is found and taken, or something is
stored (``PUT_TIMEOUT_S``) after what a command was storing."""
EXIT_CRASHED = 1
END_TIMEOUT_S = 10.0
"""For Ray to end this process as it was told."""


class Controller:
    """The actor around ``Orders`` and a ``ControlLoop``. One thread acts; Ray's calls order.

    Another one ends the process, for Ray to start it anew, when the first hangs.
    """

    def __init__(
        self,
        namespace: str,
        sentinel: ActorHandle[Any] | None,
        beginning: Beginning,
        stall_limit_s: float = STALL_LIMIT_S,
    ) -> None:
        die_with_parent()
        own_id = ray.get_runtime_context().get_actor_id()
        self._store = WantedStore(namespace, beginning, own_id)
        wanted = self._begun()
        self._store.count_start()
        plan = wanted.plan
        set_up_logging(plan.log_level, worker=NAME, role="deploy", log_format=plan.log_format)
        services = RayServices(namespace, sentinel)
        services.adopt(wanted.revisions)
        self._orders = Orders(wanted, self._store.put)
        self._loop = ControlLoop(self._orders, services)
        if sentinel is not None:
            outlive_not(sentinel, self._end)
        acting = threading.Thread(target=self._run, name=NAME, daemon=True)
        acting.start()
        watch(acting, lambda: self._loop.progress, _crash, stall_limit_s)

    def __repr__(self) -> str:
        return NAME

    def events(self, life: int, start: int, wait_s: float) -> tuple[int, int, list[Event]]:
        """See ``ControlLoop``."""
        return self._loop.events(life, start, wait_s)

    def services(self) -> list[Row]:
        """Return all services as last seen."""
        return self._loop.services()

    def scale(self, counts: Mapping[Role, int], roles: Mapping[str, Role]) -> Outcome:
        """See ``Orders``."""
        return self._orders.scale(counts, roles, self._loop.observed)

    def update(self, config: SluiceConfig) -> Outcome:
        """See ``Orders``."""
        return self._orders.update(config)

    def undo(self) -> Outcome:
        """See ``Orders``."""
        return self._orders.undo()

    def apply(self, config: SluiceConfig) -> Outcome:
        """See ``Orders``."""
        return self._orders.apply(config)

    def halt(self) -> bool:
        """See ``ControlLoop``."""
        return self._loop.halt()

    def _run(self) -> None:
        try:
            self._loop.step(0.0)  # nobody may be there yet who could have news
            while self._loop.step(TICK_S):
                pass
        except BaseException:
            log.exception("event=crashed service=%s", NAME)
            logging.shutdown()
            _crash()  # a thread's end would leave an actor that only seems to be one

    def _begun(self) -> Wanted:
        """Return what to begin with, or end unheard: Ray prints what a constructor raises."""
        try:
            return self._store.begin()
        except StoppedMeanwhileError:
            self._end()
            threading.Event().wait(END_TIMEOUT_S)
            raise

    def _end(self) -> None:
        """For good, though Ray is told to start it anew after a death. No key stays behind."""
        self._store.wipe()
        ray.kill(ray.get_runtime_context().current_actor, no_restart=True)


def _crash() -> None:
    """Have Ray start the controller anew."""
    os._exit(EXIT_CRASHED)


# Threads: one blocked in ``events`` per watching driver, one for each short call.
RemoteController = ray.remote(num_cpus=0, max_restarts=-1, max_concurrency=8)(Controller)
