"""``sluice scale``, ``update`` and ``down``: what a running deployment's controller is asked.

They go through Ray and not the API: whoever may start processes on the cluster may change what
runs there, and a client of the API may not.
"""

import shlex
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from core.config import SluiceConfig
from core.errors import ConfigError, SluiceError
from core.messages import Role
from deploy.cluster.environment import named_cluster, prepare_asking_environment
from deploy.cluster.reach import cluster_started_here, file_of_cluster_started_here, joined
from deploy.run_file import RunningSession, find_session, running_here, wait_end
from deploy.supervision.outcome import Outcome, Refused, Unchanged

CALL_TIMEOUT_S = 30.0
DRIVER_END_TIMEOUT_S = 30.0
"""For Ray's processes to end, after the services have."""


@dataclass(frozen=True, slots=True)
class Found:
    """A deployment, while this process is connected to its cluster."""

    controller: Any
    """None: it is gone for good, and what it started is still there."""
    namespace: str
    session: RunningSession | None
    """None: it runs in a cluster that ends without it."""


def run_scale(
    name: str, address: str | None, counts: dict[Role, int], roles: dict[str, Role]
) -> int:
    """Change the numbers of workers, or their roles. Returns when the controller has taken it.

    Raises:
        ConfigError: there is no such deployment, or it cannot be so.
    """
    if not counts and not roles:
        raise ConfigError("say what to change: prefill=N, decode=N or --role WORKER=ROLE")
    _ask(name, address, lambda controller: controller.scale.remote(counts, roles))
    return 0


def run_update(name: str, address: str | None, config: SluiceConfig) -> int:
    """Replace all workers, few at a time, by such that run by ``config``, and say how to undo it.

    Raises:
        ConfigError: there is no such deployment, or it cannot be so.
    """
    if _ask(name, address, lambda controller: controller.update.remote(config)):
        where = [] if address is None else ["--address", address]
        undo = shlex.join(["sluice", "update", "--undo", "--name", name, *where])
        sys.stdout.write(f"{undo} takes it back\n")
    return 0


def run_undo(name: str, address: str | None) -> int:
    """Have the deployment go by the last other config by which workers have served.

    Raises:
        ConfigError: there is no such deployment, or no such update.
    """
    _ask(name, address, lambda controller: controller.undo.remote())
    return 0


def run_down(name: str, address: str | None, *, grace_s: float) -> int:
    """Stop the deployment called ``name``, though its controller be gone for good.

    Returns when nothing of it is left, its own Ray session included.

    Raises:
        ConfigError: there is none.
        SluiceError: its session does not end.
    """
    with _found(name, address) as found:
        from deploy.supervision.stopping import stop_all  # noqa: PLC0415 - imports Ray

        driver = None if found.session is None else found.session.driver()
        stop_all(found.namespace, grace_s)
    if driver is not None and not wait_end(driver, DRIVER_END_TIMEOUT_S):
        raise SluiceError(
            f"the router and the workers of {name!r} are stopped, but process {driver.pid}, "
            f"which started them, still runs after {DRIVER_END_TIMEOUT_S:.0f} s; kill it"
        )
    sys.stdout.write(f"{name}: stopped\n")
    return 0


def _ask(name: str, address: str | None, call: Callable[[Any], Any]) -> bool:
    """Have the controller do what ``call`` asks, and say what becomes of it.

    Returns:
        Whether it changes anything.

    Raises:
        ConfigError: there is no such deployment, or the controller has refused it.
        SluiceError: the controller does not answer.
    """
    with _found(name, address) as found:
        if found.controller is None:
            raise SluiceError(
                f"the controller of {name!r} stays down; see its log, or stop with down"
            )
        import ray  # noqa: PLC0415 - reads the environment when it is imported
        from ray.exceptions import RayError  # noqa: PLC0415

        try:
            outcome: Outcome = ray.get(call(found.controller), timeout=CALL_TIMEOUT_S)
        except RayError as error:
            raise SluiceError(
                f"the controller of {name!r} does not answer; look by sluice status whether it has "
                "taken this, and try again if not"
            ) from error
    if isinstance(outcome, Refused):
        raise ConfigError(outcome.reason)
    if isinstance(outcome, Unchanged):
        sys.stdout.write(f"{name}: unchanged; it goes by this config already\n")
        return False
    sys.stdout.write(
        f"{name}: taken; sluice status shows it being carried out, and who cannot start and why\n"
    )
    if outcome.advice:
        sys.stdout.write(f"{name}: warning: {outcome.advice}\n")
    return True


@contextmanager
def _found(name: str, address: str | None) -> Generator[Found]:
    """Connect to the cluster of the deployment called ``name`` and find its controller."""
    target = named_cluster(address)
    session = find_session(name) if target is None else None
    prepare_asking_environment(session.token if session else None)
    # Imported after it: Ray reads the environment when it is imported.
    from deploy.supervision.lookup import find_controller, namespace_of, services_of  # noqa: PLC0415
    from deploy.supervision.wanted import is_stored  # noqa: PLC0415

    namespace = namespace_of(name)
    target = target or (session.address if session else cluster_started_here())
    if target is None:
        raise ConfigError(
            f"no deployment called {name!r} of this user runs on this machine{_others()}, and "
            f"{file_of_cluster_started_here()}, where ray start leaves the address of a cluster, "
            "has none; give --name or --address"
        )
    with joined(
        target,
        "--address or RAY_ADDRESS",
        namespace=namespace,
        log_to_driver=False,
        _node_ip_address="127.0.0.1" if session else None,
    ):
        controller = find_controller(namespace)
        if controller is None and not is_stored(namespace) and not services_of(namespace):
            others = "" if named_cluster(address) else _others()
            raise ConfigError(f"no deployment called {name!r} runs there{others}; give --name")
        yield Found(controller, namespace, session)


def _others() -> str:
    """Return which deployments of this user run on this machine, to go on in a sentence."""
    names = running_here()
    return f" (running here: {', '.join(names)})" if names else ""
