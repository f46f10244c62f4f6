"""Empty this pod before it ends: no new worker here, and the one that is here ends its requests.

Ray is told that the node leaves, so that nothing is placed on it any more; then the workers of this
pod are drained. Ends when they have ended, or when the given number of seconds is over.
"""

# ruff: noqa: S603, S607

import socket
import subprocess
import sys
import time
from contextlib import suppress

import ray
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayError

POLL_S = 0.5
CALL_TIMEOUT_S = 15.0
"""A worker under load answers late, and one that is not asked would lose its requests."""
WAIT_END_S = 2.0


def leave_cluster(seconds: int) -> None:
    """Have Ray place nothing here any more."""
    node_id = ray.get_runtime_context().get_node_id()
    subprocess.run(
        [
            "ray", "drain-node", "--address", ray.get_runtime_context().gcs_address,
            "--node-id", node_id, "--reason", "DRAIN_NODE_REASON_PREEMPTION",
            "--reason-message", "the pod is being deleted",
            "--deadline-remaining-seconds", str(seconds),
        ],
        timeout=30, check=False,
    )  # fmt: skip


def workers_here() -> list[object]:
    """Return the service actors whose process is in this pod."""
    asked = {}
    for named in ray.util.list_named_actors(all_namespaces=True):
        with suppress(ValueError):  # gone meanwhile
            actor = ray.get_actor(named["name"], namespace=named["namespace"])
            if hasattr(actor, "identity"):
                asked[actor.identity.remote()] = actor
    if not asked:
        return []
    # All at once: those that Ray has not placed yet do not answer.
    answers, _ = ray.wait(list(asked), num_returns=len(asked), timeout=CALL_TIMEOUT_S)
    here = []
    for answer in answers:
        with suppress(RayError):
            if ray.get(answer, timeout=CALL_TIMEOUT_S).host == socket.gethostname():
                here.append(asked[answer])
    return here


def has_ended(actor: object) -> bool:
    """Return whether the worker has finished what it had."""
    try:
        return ray.get(actor.wait_end.remote(WAIT_END_S), timeout=CALL_TIMEOUT_S) is not None
    except (ActorUnavailableError, GetTimeoutError):
        return False  # it is busy
    except RayError:
        return True


def main() -> int:
    """Drain, and wait."""
    seconds = int(sys.argv[1])
    deadline = time.monotonic() + seconds
    ray.init(address="auto", log_to_driver=False, logging_level="ERROR")
    actors = workers_here()
    leave_cluster(seconds)
    for actor in actors:
        actor.drain.remote()
    while actors and time.monotonic() < deadline:
        actors = [actor for actor in actors if not has_ended(actor)]
        time.sleep(POLL_S)
    return 0


if __name__ == "__main__":
    sys.exit(main())
