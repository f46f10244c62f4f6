"""Stops a deployment for good: its own driver does, or ``sluice down`` from anywhere."""

import logging
import time
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError

from deploy.cluster.ray_errors import last_line
from deploy.supervision import wanted
from deploy.supervision.lookup import find_controller, services_of

log = logging.getLogger(__name__)

HALT_SHARE = 0.25
"""Of the time to stop: for the controller to end what it does. A frozen one is killed amid it."""


def stop_all(namespace: str, grace_s: float, *, of: ActorHandle[Any] | None = None) -> None:
    """End the controller, then all services, the router first; kill what does not stop.

    Args:
        namespace: Of the deployment.
        grace_s: For the services to end by themselves.
        of: The controller that this is about: where another one has its name by now, that one's
            deployment is left alone.
    """
    grace_s = max(grace_s, 1.0)
    deadline = time.monotonic() + grace_s
    controller = find_controller(namespace)
    if controller is not None and of is not None and controller != of:
        return
    if controller is not None:
        wanted.forbid(namespace, controller._actor_id.hex())  # noqa: SLF001 - no public name
        _halt(controller, grace_s * HALT_SHARE)
    start = wanted.start_id(namespace)  # before the name is free for another one
    if controller is not None:
        ray.kill(controller, no_restart=True)
    wanted.clear(namespace, start)  # at once: who stops may be killed while services end
    services = services_of(namespace)
    for service in services.values():
        service.expect_stop.remote()
    # The router first: it ends what is pending, and does not take the workers' end for a loss.
    routers = {name: actor for name, actor in services.items() if name == "router"}
    _stop_some(routers, deadline - grace_s / 2)
    _stop_some({n: a for n, a in services.items() if n not in routers}, deadline)
    for service in services.values():
        ray.kill(service, no_restart=True)
    wanted.clear(namespace, start)


def _halt(controller: ActorHandle[Any], timeout_s: float) -> None:
    """Have the controller start nothing after what can be found now."""
    try:
        ray.get(controller.halt.remote(), timeout=timeout_s)
    except RayError as error:
        log.debug("event=not_halted reason=%s", last_line(error))


def _stop_some(services: dict[str, Any], deadline: float) -> None:
    for service in services.values():
        service.stop.remote()
    ends = {
        service.wait_end.remote(max(deadline - time.monotonic(), 0.1)): name
        for name, service in services.items()
    }
    if not ends:
        return
    left_s = max(deadline - time.monotonic(), 0.0)
    _, late = ray.wait(list(ends), num_returns=len(ends), timeout=left_s, fetch_local=False)
    for call in late:
        log.warning("event=killed service=%s reason=did not stop in time", ends[call])
