"""What both drivers of a deployment share: of ``sluice serve`` and of ``sluice workers``."""

import logging
import os
from collections.abc import Generator
from contextlib import contextmanager

from rich.console import Console

from core.channel import DeploymentKeys
from core.config import DeployConfig, SluiceConfig
from core.errors import ConfigError, SluiceError
from deploy.cluster.environment import cluster_address
from deploy.cluster.ports import claim_port
from deploy.cluster.session import PROJECT_ROOT, RaySession
from deploy.model_source import ModelFolder
from deploy.run_file import RunningSession, announced
from deploy.supervision.plan import DeploymentPlan

log = logging.getLogger(__name__)


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
    address = config.router.control_address
    if own_router or address is None:
        port = claim_port(host, config.router.control_port, field="router.control_port")
        address = f"tcp://{host}:{port}"
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
def findable(name: str, session: RaySession) -> Generator[None]:
    """Let commands of this user find a private session; a cluster's address they are given."""
    if not session.private:
        yield
        return
    running_session = RunningSession(
        address=session.address, token=os.environ["RAY_AUTH_TOKEN"], pid=os.getpid()
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
