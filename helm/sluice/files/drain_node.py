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
from ray.exceptions import ActorUnavailableError, RayError

POLL_S = 0.5
WAIT_END_S = 2.0
KNOWN_WITHIN_S = 15.0
"""A worker under load answers late who it is. One that Ray has not placed yet never does."""


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


def ask_all() -> dict[object, object]:
    """Ask every service of the cluster who it is, and return whom by the question."""
    asked = {}
    for named in ray.util.list_named_actors(all_namespaces=True):
        with suppress(ValueError):  # gone meanwhile
            actor = ray.get_actor(named["name"], namespace=named["namespace"])
            if hasattr(actor, "identity"):
                asked[actor.identity.remote()] = actor
    return asked


def is_here(answer: object) -> bool:
    """Return whether the service runs in this pod."""
    try:
        return ray.get(answer).host == socket.gethostname()
    except RayError:
        return False


def has_ended(answer: object) -> bool:
    """Return whether the service has finished what it had."""
    try:
        return ray.get(answer) is not None
    except ActorUnavailableError:
        time.sleep(POLL_S)
        return False
    except RayError:
        return True


def main() -> int:
    """Drain, and wait."""
    seconds = int(sys.argv[1])
    deadline = time.monotonic() + seconds
    ray.init(address="auto", log_to_driver=False, logging_level="ERROR")
    asked, ends = ask_all(), {}
    leave_cluster(seconds)
    known_by = time.monotonic() + KNOWN_WITHIN_S
    while time.monotonic() < deadline and (ends or (asked and time.monotonic() < known_by)):
        answers, _ = ray.wait([*asked, *ends], num_returns=1, timeout=POLL_S)
        for answer in answers:
            if answer in ends:
                actor = ends.pop(answer)
                is_waited_for = not has_ended(answer)
            else:
                actor = asked.pop(answer)
                if is_waited_for := is_here(answer):
                    actor.drain.remote()
            if is_waited_for:
                ends[actor.wait_end.remote(WAIT_END_S)] = actor
    return 0


if __name__ == "__main__":
    sys.exit(main())
