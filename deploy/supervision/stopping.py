"""Stops a deployment for good: its own driver does, or ``sluice down`` from anywhere."""

import logging
import time
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError

from deploy.cluster.ray_errors import last_line
from deploy.supervision import wanted
from deploy.supervision.lookup import find_controller, is_up, services_of

log = logging.getLogger(__name__)

HALT_SHARE = 0.25
"""Of the time to stop: for the controller to end what it does. A frozen one is killed amid it."""
LOOK_TIMEOUT_S = 1.0
"""For fetching an answer that is there."""


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
        # One that has stored nothing yet finds itself forbidden, and starts nothing.
        if wanted.is_stored(namespace):
            _halt(controller, grace_s * HALT_SHARE)
    start = wanted.start_id(namespace)  # before the name is free for another one
    if controller is not None:
        ray.kill(controller, no_restart=True)
    wanted.clear(namespace, start)  # at once: who stops may be killed while services end
    services = _end_waiting(services_of(namespace))
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
    """Have the controller start nothing after what can be found now, unless it hangs amid that."""
    try:
        if not ray.get(controller.halt.remote(), timeout=timeout_s):
            log.debug("event=not_halted reason=one action is still under way")
    except RayError as error:
        log.debug("event=not_halted reason=%s", last_line(error))


def _end_waiting(services: dict[str, Any]) -> dict[str, Any]:
    """Kill what waits for room, or for its process to be up, and return the others."""
    up = {name: actor for name, actor in services.items() if is_up(actor)}
    for name, actor in services.items():
        if name not in up:
            ray.kill(actor, no_restart=True)
    return up


def _stop_some(services: dict[str, Any], deadline: float) -> None:
    """Have ``services`` end by themselves until ``deadline``; kill what does not serve yet.

    What loads a model hears of no stop before it has, and has nothing to finish.
    """
    for service in services.values():
        service.stop.remote()
    looks = {service.health.remote(): service for service in services.values()}
    left_s = max(deadline - time.monotonic(), 0.1)
    ends = {service.wait_end.remote(left_s): name for name, service in services.items()}
    pending = [*looks, *ends]
    while late := ends.keys() & set(pending):
        left_s = max(deadline - time.monotonic(), 0.0)
        done, pending = ray.wait(pending, num_returns=1, timeout=left_s, fetch_local=False)
        if not done:
            break
        for look in looks.keys() & set(done):
            if _is_starting(look):
                ray.kill(looks[look], no_restart=True)
    for call in late:
        log.warning("event=killed service=%s reason=did not stop in time", ends[call])


def _is_starting(look: ray.ObjectRef[Any]) -> bool:
    """Return what a service has answered when asked for its health."""
    try:
        return ray.get(look, timeout=LOOK_TIMEOUT_S).state == "starting"
    except RayError:
        return False  # it has ended meanwhile
