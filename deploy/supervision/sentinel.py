"""Ties detached actors to the process that started the deployment.

The services are detached, so that none ends when the controller does. To end with the driver all
the same, however that ends, each waits for a small actor that is *not* detached: Ray ends it with
the driver's job, and then they end themselves.
"""

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import ActorUnavailableError, RayError

UNAVAILABLE_RETRY_S = 1.0


class Sentinel:
    """Does nothing for as long as its job lives."""

    async def wait(self) -> None:
        """Never return."""
        await asyncio.Event().wait()


RemoteSentinel = ray.remote(num_cpus=0, max_concurrency=1000)(Sentinel)


def outlive_not(sentinel: ActorHandle[Any], end: Callable[[], None]) -> None:
    """Call ``end``, in a thread of its own, when ``sentinel`` is gone for good."""
    stop = threading.Event()

    def watch() -> None:
        while True:
            try:
                ray.get(sentinel.wait.remote())
            except ActorUnavailableError:
                stop.wait(UNAVAILABLE_RETRY_S)  # the network; Ray tells when it is gone for good
            except RayError:
                break
        end()

    threading.Thread(target=watch, name="sentinel", daemon=True).start()
