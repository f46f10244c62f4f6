"""A whole deployment as a ``with`` block: model, ports, Ray, router and workers, and their end."""

import time
from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager

from rich.console import Console

from core.config import RouterConfig, SluiceConfig
from core.errors import ConfigError, SluiceError
from core.ids import WorkerId
from deploy.api_client import ApiClient, UnreachableError
from deploy.cluster.environment import cluster_address
from deploy.cluster.ports import claim_port, held
from deploy.cluster.session import RaySession, ray_session
from deploy.driver import findable, not_ready, plan_of, refuse_detached_in_private, tell
from deploy.model_source import ModelFolder, resolve_model
from deploy.supervision.events import Event, EventQueue, StopRequested
from deploy.supervision.service_names import worker_name
from deploy.supervision.stop_signals import StopSignals
from deploy.supervision.supervisor import Supervisor
from router.api_keys import read_keys

PROBE_INTERVAL_S = 0.25
WILDCARD_HOSTS = ("0.0.0.0", "::")  # noqa: S104 - compared with, not bound to


class StoppedEarly(SluiceError):  # noqa: N818 - not an error, but the way out of a start
    """Ctrl-C or SIGTERM came while the deployment was starting."""


class Deployment:
    """A running deployment."""

    def __init__(
        self,
        config: SluiceConfig,
        supervisor: Supervisor,
        session: RaySession,
        signals: StopSignals,
    ) -> None:
        self._config = config
        self._supervisor = supervisor
        self._session = session
        self._signals = signals
        self.client = client_of(config)
        self.is_left = False
        """Whether it goes on after the ``with`` block."""

    @property
    def url(self) -> str:
        """Of the API."""
        return self.client.url

    def next_event(self, timeout_s: float | None = None) -> Event | None:
        """Return the next event, None after ``timeout_s``; see ``Supervisor.next_event``."""
        event = self._supervisor.next_event(timeout_s)
        if event is not None:
            self._session.on_new_process()
        return event

    def leave(self) -> None:
        """Have it go on after the ``with`` block, until ``sluice down``."""
        self.is_left = True

    def interruptible(self) -> AbstractContextManager[None]:
        """Return a ``with`` block that a stop signal leaves by ``StopInterrupt``.

        For waits on anything but ``next_event``, in the main thread.
        """
        return self._signals.interrupting()

    def wait_until_ready(self, console: Console) -> None:
        """Return once every worker is ready and a generation can pass.

        Raises:
            StoppedEarly: a stop was asked for.
            ConfigError: a service met an error that no restart can mend.
            SluiceError: not ready within ``start_timeout_s``.
        """
        deadline = time.monotonic() + self._config.deploy.start_timeout_s
        shown: set[WorkerId] = set()
        with console.status("starting ..."):
            while not self._is_complete(shown, console):
                if isinstance(self.next_event(PROBE_INTERVAL_S), StopRequested):
                    raise StoppedEarly("stopped while starting")
                if time.monotonic() > deadline:
                    missing = ", ".join(sorted(self._expected() - shown)) or "a first generation"
                    reason = self._supervisor.waits() or f"missing: {missing}"
                    raise not_ready(self._config.deploy, reason)

    def _expected(self) -> set[WorkerId]:
        return {
            worker_name(role, index)
            for role, count in self._config.deploy.counts.items()
            for index in range(count)
        }

    def _is_complete(self, shown: set[WorkerId], console: Console) -> bool:
        try:
            workers = self.client.workers()
        except UnreachableError:
            return False
        ready = {worker.worker_id for worker in workers if worker.state == "ready"}
        for worker_id in sorted(ready - shown):
            console.print(f"  {worker_id} ready", highlight=False)
        shown |= ready
        return self._expected() <= ready and self.client.is_ready()


@contextmanager
def running(config: SluiceConfig, console: Console) -> Generator[Deployment]:
    """Run a deployment of ``config`` for the time of the ``with`` block, in the main thread.

    It is ready when the block begins. When the block ends, for whatever reason, everything is
    stopped within ``stop_timeout_s``, and nothing is left of it; unless it is ``leave``d.

    Raises:
        StoppedEarly: a stop was asked for while starting.
        ConfigError: one line for the operator; nothing is left running.
        SluiceError: the deployment did not become ready.
    """
    if config.router.control_address is not None:
        raise ConfigError(
            "router.control_address: this command starts a router of its own; leave it out, or "
            "use sluice workers"
        )
    refuse_detached_in_private(config)
    config = _with_port(config)
    model = resolve_model(config.model.model, config.model.revision)
    events = EventQueue()
    signals = StopSignals(events)
    started_s = time.monotonic()
    with held(config.router.host, config.router.port), signals.installed():
        address = cluster_address(config.deploy)
        console.print(f"joining Ray at {address} ..." if address else "starting Ray ...")
        with ray_session(config.deploy) as session:
            signals.install()
            plan = plan_of(config, model, session)
            supervisor = Supervisor(plan, events, private=session.private)
            deployment: Deployment | None = None
            with held(plan.host, plan.control_port):
                try:
                    _announce(config, model, console)
                    supervisor.start()
                    deployment = Deployment(config, supervisor, session, signals)
                    deployment.wait_until_ready(console)
                    supervisor.is_ready = True
                    tell(console, f"ready in {time.monotonic() - started_s:.1f} s", "ready")
                    with findable(config.deploy.name, session):
                        yield deployment
                finally:
                    if deployment is not None and deployment.is_left:
                        supervisor.leave()
                    else:
                        tell(console, "stopping ...", "stopping")
                        supervisor.stop()
                        tell(console, "stopped", "stopped")


def _announce(config: SluiceConfig, model: ModelFolder, console: Console) -> None:
    name = config.model.served_name or model.served_name
    counts = f"{config.deploy.prefill} prefill, {config.deploy.decode} decode"
    console.print(
        f"loading {name} ({config.model.dtype}) on {counts} worker(s) ...", highlight=False
    )


def _with_port(config: SluiceConfig) -> SluiceConfig:
    """Return ``config`` with the API's port settled, free and the same after a restart."""
    port = claim_port(config.router.host, config.router.port, field="router.port")
    router = config.router.model_copy(update={"port": port})
    return config.model_copy(update={"router": router})


def client_of(config: SluiceConfig) -> ApiClient:
    """Return a client of the router that ``config`` starts, with one of the keys it admits.

    Raises:
        ConfigError: the file of API keys cannot be used.
    """
    file = config.security.api_keys_file
    api_key = None if file is None else read_keys(file)[0]
    return ApiClient(_url(config.router), timeout_s=2.0, api_key=api_key)


def _url(router: RouterConfig) -> str:
    host = "127.0.0.1" if router.host in WILDCARD_HOSTS else router.host
    return f"http://[{host}]:{router.port}" if ":" in host else f"http://{host}:{router.port}"
