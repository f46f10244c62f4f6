"""A whole deployment as a ``with`` block: a router of its own, its ports, and workers."""

import time
from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager

from rich.console import Console

from core.config import SluiceConfig
from core.errors import ConfigError
from core.ids import WorkerId
from deploy.api_client import ApiClient, UnreachableError, url_of_router
from deploy.cluster.ports import claim_port, held
from deploy.driver import Driver, driving, refuse_detached_in_private, tell
from deploy.supervision.plan import DeploymentPlan
from deploy.supervision.service_names import worker_name
from router.api_keys import read_keys

PROBE_INTERVAL_S = 0.25


class Deployment:
    """A running deployment."""

    def __init__(self, config: SluiceConfig, driver: Driver, client: ApiClient) -> None:
        self._config = config
        self._driver = driver
        self.client = client

    @property
    def url(self) -> str:
        """Of the API."""
        return self.client.url

    def leave(self) -> None:
        """Have it go on after the ``with`` block, until ``sluice down``."""
        self._driver.is_left = True

    def wait_for_stop(self) -> None:
        """See ``Driver``."""
        self._driver.wait_for_stop()

    def interruptible(self) -> AbstractContextManager[None]:
        """See ``Driver``."""
        return self._driver.interruptible()

    def wait_until_ready(self, console: Console) -> None:
        """Return once every worker is ready and a generation can pass; see ``Driver``."""
        shown: set[WorkerId] = set()

        def missing() -> str:
            workers = ", ".join(sorted(self._expected() - shown))
            return f"missing: {workers or 'a first generation'}"

        with console.status("starting ..."):
            self._driver.wait_until_ready(
                lambda: self._is_complete(shown, console), missing, PROBE_INTERVAL_S
            )

    def _expected(self) -> set[WorkerId]:
        return {
            worker_name(role, index)
            for role, count in self._config.deploy.counts.items()
            for index in range(count)
        }

    def _is_complete(self, shown: set[WorkerId], console: Console) -> bool:
        try:
            with self.interruptible():
                workers = self.client.workers()
        except UnreachableError:
            return False
        ready = {worker.worker_id for worker in workers if worker.state == "ready"}
        for worker_id in sorted(ready - shown):
            console.print(f"  {worker_id} ready", highlight=False)
        shown |= ready
        if not self._expected() <= ready:
            return False
        with self.interruptible():
            return self.client.is_ready()


@contextmanager
def running(config: SluiceConfig, console: Console) -> Generator[Deployment]:
    """Run a deployment of ``config`` for the time of the ``with`` block, in the main thread.

    It is ready when the block begins. When the block ends, for whatever reason, everything is
    stopped within ``stop_timeout_s``, and nothing is left of it; unless it is ``leave``d.

    Raises:
        StopInterrupt: a stop was asked for while starting.
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
    client = client_of(config)
    started_s = time.monotonic()
    with held(config.router.host, config.router.port), driving(config, console) as driver:
        plan = driver.plan
        with held(plan.host, plan.control_port):
            deployment = Deployment(config, driver, client)
            _announce(plan, console)
            driver.start()
            deployment.wait_until_ready(console)
            tell(console, f"ready in {time.monotonic() - started_s:.1f} s", "ready")
            yield deployment


def _announce(plan: DeploymentPlan, console: Console) -> None:
    model, deploy = plan.config.model, plan.deploy
    counts = f"{deploy.prefill} prefill, {deploy.decode} decode"
    console.print(
        f"loading {plan.served_name} ({model.dtype}) on {counts} worker(s) ...", highlight=False
    )
    if advice := plan.advice(plan.replicas()):
        console.print(f"warning: {advice}", highlight=False, soft_wrap=True)


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
    return ApiClient(url_of_router(config.router), timeout_s=2.0, api_key=api_key)
