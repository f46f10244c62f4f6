"""The driver of a deployment, as a ``with`` block: signals, Ray, a supervisor, and their end.

``deployment`` gives it a router of its own, for ``sluice serve``; ``sluice workers`` has none.
"""

import logging
import os
import shlex
import time
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, suppress

from rich.console import Console

from core.channel import DeploymentKeys
from core.config import DeployConfig, SluiceConfig
from core.errors import ConfigError, SluiceError
from deploy.api_client import url_of_router
from deploy.cluster.environment import cluster_address
from deploy.cluster.ports import claim_port
from deploy.cluster.session import PROJECT_ROOT, RaySession, ray_session
from deploy.model_source import ModelFolder, resolve_model
from deploy.run_file import RunningSession, announced
from deploy.supervision.events import Event, EventQueue, StopRequested
from deploy.supervision.plan import DeploymentPlan
from deploy.supervision.stop_signals import StopInterrupt, StopSignals
from deploy.supervision.supervisor import Supervisor

log = logging.getLogger(__name__)

NOT_SAID = (OSError, SystemExit)
"""What printing raises where nobody reads; rich would end the process."""


class Driver:
    """Follows one deployment from the main thread of the process that has started it."""

    def __init__(
        self, plan: DeploymentPlan, session: RaySession, signals: StopSignals, events: EventQueue
    ) -> None:
        self.plan = plan
        """As it was at the start."""
        self.supervisor = Supervisor(
            plan, events, private=session.private, is_stop_asked=lambda: signals.received
        )
        self._session = session
        self._signals = signals
        self.is_left = False
        """Whether the deployment goes on after the ``with`` block, until ``sluice down``."""

    def start(self) -> None:
        """Start the deployment; returns before anything is ready.

        Raises:
            StopInterrupt: a stop was asked for before.
            ConfigError: as ``Supervisor.start``.
        """
        if self._signals.received:
            raise StopInterrupt
        self.supervisor.start()

    def next_event(self, timeout_s: float | None = None) -> Event | None:
        """Return the next event, None after ``timeout_s``; see ``Supervisor.next_event``.

        Raises:
            StopInterrupt: it is that a stop was asked for.
        """
        event = self.supervisor.next_event(timeout_s)
        if isinstance(event, StopRequested):
            raise StopInterrupt
        if event is not None:
            self._session.on_new_process()
        return event

    def interruptible(self) -> AbstractContextManager[None]:
        """Return a ``with`` block that a stop signal leaves by ``StopInterrupt``.

        In the main thread, for waits on anything but ``next_event`` and Ray; see ``StopSignals``.
        """
        return self._signals.interrupting()

    def wait_until_ready(
        self, is_ready: Callable[[], bool], missing: Callable[[], str], look_s: float
    ) -> None:
        """Return once ``is_ready``, which is asked after every event and every ``look_s``.

        Args:
            is_ready: Returns soon after a stop was asked for.
            missing: For the error.
            look_s: Between two looks.

        Raises:
            StopInterrupt: a stop was asked for.
            ConfigError: a service met an error that no restart can mend.
            SluiceError: not ready within ``start_timeout_s``: Ray has no room, or what is
                ``missing``.
        """
        deploy = self.plan.deploy
        deadline = time.monotonic() + deploy.start_timeout_s
        while not is_ready():
            self.next_event(look_s)
            if time.monotonic() > deadline:
                raise not_ready(deploy, self.supervisor.waits() or missing())
        self.supervisor.tolerate_failures()

    def wait_for_stop(self) -> None:
        """Return when a stop is asked for.

        Raises:
            SluiceError: the router or the controller is gone for good.
        """
        try:
            while True:
                self.next_event()
        except StopInterrupt:
            return


@contextmanager
def driving(
    config: SluiceConfig, console: Console, *, own_router: bool = True
) -> Generator[Driver]:
    """Connect to Ray and yield a driver of ``config`` for the time of the ``with`` block.

    In the main thread. The block starts the deployment. When it ends, for whatever reason,
    everything is stopped within ``stop_timeout_s``, and nothing is left; unless it ``is_left``.

    Raises:
        StopInterrupt: a stop was asked for. One that comes while Ray starts ends the process.
        ConfigError: one line for the operator; nothing is left running.
    """
    model = resolve_model(config.model.model, config.model.revision)
    events = EventQueue()
    signals = StopSignals(events)
    address = cluster_address(config.deploy)
    console.print(f"joining Ray at {address} ..." if address else "starting Ray ...")
    with signals.installed(), ray_session(config.deploy, signals.ending_all) as session:
        signals.install()
        plan = plan_of(config, model, session, own_router=own_router)
        driver = Driver(plan, session, signals, events)
        down = how_to_stop(config.deploy.name, None if session.private else session.address)
        url = url_of_router(config.router) if own_router else None
        with ended(driver, console, down), findable(config.deploy.name, session, url):
            yield driver


@contextmanager
def ended(driver: Driver, console: Console, down: str) -> Generator[None]:
    """Stop, or leave, the deployment of ``driver`` after the ``with`` block, and say so.

    Whether or not anybody reads that: a ``tee`` ends by the same Ctrl-C.

    Args:
        driver: Says which of both.
        console: Where it is said.
        down: The command that stops what is left.
    """
    try:
        yield
    finally:
        if driver.is_left:
            with suppress(*NOT_SAID):
                console.print(f"it goes on by itself; {down} stops it", soft_wrap=True)
            driver.supervisor.leave()
        else:
            with suppress(*NOT_SAID):
                tell(console, "stopping ...", "stopping")
            driver.supervisor.stop()
            with suppress(*NOT_SAID):
                tell(console, "stopped", "stopped")


def how_to_stop(name: str, address: str | None) -> str:
    """Return the command that ends the deployment called ``name``, in the cluster it joined."""
    words = ["sluice", "down"]
    if name != DeployConfig().name:
        words += ["--name", name]
    if address is not None:
        words += ["--address", address]
    return shlex.join(words)


def refuse_detached_in_private(config: SluiceConfig) -> None:
    """Refuse a deployment that is to outlive the session that it would run in.

    Raises:
        ConfigError: as said.
    """
    if config.deploy.lifetime == "detached" and cluster_address(config.deploy) is None:
        raise ConfigError(
            "deploy.lifetime=detached: a Ray session of its own ends with this process; give "
            "deploy.ray_address, or lifetime: job"
        )


def plan_of(
    config: SluiceConfig, model: ModelFolder, session: RaySession, *, own_router: bool = True
) -> DeploymentPlan:
    """Return how the services of ``config`` are started in ``session``.

    Raises:
        ConfigError: no worker could be started by it, or the router's port is taken.
    """
    host = session.driver_host
    if own_router:
        port = claim_port(host, config.router.control_port, field="router.control_port")
        address = f"tcp://{host}:{port}"
    else:
        assert config.router.control_address is not None, "workers alone are checked for one"
        address = config.router.control_address
    plan = DeploymentPlan(
        config=config,
        model_path=model.path,
        served_name=config.model.served_name or model.served_name,
        keys=DeploymentKeys.generate(),
        host=host,
        router_address=address,
        own_router=own_router,
        private=session.private,
        num_gpus=session.num_gpus,
        environment=_environment(session),
    )
    plan.check()
    return plan


def _environment(session: RaySession) -> dict[str, str]:
    environment = {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    if session.temp_folder is not None:
        environment["TMPDIR"] = str(session.temp_folder)  # libraries leave folders behind
    if session.private:
        # A joined cluster gets our packages through Ray's runtime environment instead.
        environment["PYTHONPATH"] = str(PROJECT_ROOT)
        # On one machine KV crosses by shared memory; UCX need not listen on any other interface.
        environment["UCX_NET_DEVICES"] = os.environ.get("UCX_NET_DEVICES", "lo")
    return environment


@contextmanager
def findable(name: str, session: RaySession, url: str | None) -> Generator[None]:
    """Let commands of this user find a private session; a cluster's address they are given.

    Args:
        name: Of the deployment.
        session: Where it runs.
        url: Of its API, if this session has one.
    """
    if not session.private:
        yield
        return
    running_session = RunningSession(
        address=session.address, token=os.environ["RAY_AUTH_TOKEN"], pid=os.getpid(), url=url
    )
    with announced(name, running_session):
        yield


def tell(console: Console, text: str, state: str, url: str | None = None) -> None:
    """Print ``text``; where nothing is, since lines of JSON are read, log ``state`` instead."""
    if console.quiet:
        log.info("event=deployment state=%s url=%s", state, url)
    else:
        console.print(text, highlight=False)


def not_ready(deploy: DeployConfig, reason: str) -> SluiceError:
    """Return the error of a deployment that was not ready within ``start_timeout_s``."""
    return SluiceError(
        f"not ready after {deploy.start_timeout_s:.0f} s (deploy.start_timeout_s); {reason}"
    )
