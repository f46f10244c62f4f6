"""Where the actors of a deployment are found, by anybody who has joined its cluster."""

from typing import Any

import ray
from ray._private import state
from ray.actor import ActorHandle
from ray.util import list_named_actors

from deploy.supervision.controller import NAME as CONTROLLER


def namespace_of(name: str) -> str:
    """Return where Ray keeps the names of the deployment called ``name``."""
    return f"sluice-{name}"


def find_controller(namespace: str) -> ActorHandle[Any] | None:
    """Return the controller of the deployment in ``namespace``; None: there is none."""
    return find(CONTROLLER, namespace)


def services_of(namespace: str) -> dict[str, Any]:
    """Return all services in ``namespace`` that are not dead.

    As Ray has them: what a controller knew may be gone with it.
    """
    actors = list_named_actors(all_namespaces=True)
    names = {actor["name"] for actor in actors if actor["namespace"] == namespace}
    found = {name: find(name, namespace) for name in sorted(names - {CONTROLLER})}
    return {name: actor for name, actor in found.items() if actor is not None}


def is_up(actor: ActorHandle[Any]) -> bool:
    """Return whether ``actor`` has been placed and its process answers calls."""
    found = state.actors(actor._actor_id.hex())  # noqa: SLF001 - no public name
    return found.get("State") == "ALIVE"


def find(name: str, namespace: str) -> ActorHandle[Any] | None:
    """Return one actor; None: there is none of this name."""
    try:
        return ray.get_actor(name, namespace=namespace)
    except ValueError:
        return None
