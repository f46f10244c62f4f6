"""A deployment's plan: what each of its services is started with, now and at every later start."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from core.channel import DeploymentKeys, Party
from core.config import DeployConfig, SluiceConfig
from core.errors import ConfigError
from core.ids import WorkerId
from core.logs import LogFormat
from core.worker_context import WorkerContext
from deploy.launch import Launch
from deploy.placement import router_bundle, worker_bundle
from deploy.services import RouterService, WorkerService
from engine.threads import thread_environment
from router.server import RouterContext

NOT_OF_A_WORKER = {"router", "deploy", "prefill", "decode"}
"""Sections that change nothing in a worker's process."""
LASTING = ("router", "security", "deploy")
"""Sections that hold for a deployment's life, but for the numbers of workers."""


@dataclass(frozen=True, slots=True)
class DeploymentPlan:
    """Of one router and two fleets. See ``deploy.launch.Plan``."""

    config: SluiceConfig
    model_path: Path
    served_name: str
    keys: DeploymentKeys
    host: str
    """Of the driver and the router."""
    router_address: str
    """``tcp://HOST:PORT`` where workers report."""
    own_router: bool
    """False: routers run by themselves."""
    private: bool
    num_gpus: float
    environment: Mapping[str, str]

    @property
    def deploy(self) -> DeployConfig:
        """The settings of supervision."""
        return self.config.deploy

    @property
    def log_level(self) -> str:
        """As configured."""
        return self.config.log_level

    @property
    def log_format(self) -> LogFormat:
        """As configured."""
        return self.config.log_format

    def replicas(self) -> Mapping[Party, int]:
        """Return how many of each role there are at the start."""
        workers: dict[Party, int] = {
            "prefill": self.deploy.prefill,
            "decode": self.deploy.decode,
        }
        return {"router": 1, **workers} if self.own_router else workers

    def revision(self, role: Party) -> str:
        """Return a short name of what ``role`` runs by: of equal settings, an equal one."""
        if role == "router":
            return "router"
        own = self.config.for_role(role)
        content = own.model_dump_json(exclude=NOT_OF_A_WORKER)
        return hashlib.sha256(content.encode()).hexdigest()[:8]

    def launch(self, role: Party, name: str) -> Launch:
        """Return what to start."""
        return self._router() if role == "router" else self._worker(role, name)

    def _router(self) -> Launch:
        context = RouterContext(
            config=self.config,
            model_path=self.model_path,
            served_name=self.served_name,
            keys=self.keys.of("router"),
            host=self.host,
            control_port=int(self.router_address.rpartition(":")[2]),
        )
        bundle = router_bundle(private=self.private, driver_host=self.host)
        return Launch(RouterService(context), bundle, self.environment)

    def _worker(self, role: Party, name: str) -> Launch:
        assert role != "router", "has a launch of its own"
        own = self.config.for_role(role)
        bundle = worker_bundle(own, private=self.private, num_gpus=self.num_gpus)
        custom = (
            self.deploy.prefill_resources if role == "prefill" else self.deploy.decode_resources
        )
        context = WorkerContext(
            worker_id=WorkerId(name),
            config=own,
            model_path=self.model_path,
            served_name=self.served_name,
            router_address=self.router_address,
            keys=self.keys.of(role),
            host=self.host,
            revision=self.revision(role),
        )
        return Launch(
            WorkerService(role, context),
            bundle if self.private else bundle.with_custom(custom),
            {**self.environment, **thread_environment(own.engine.num_threads)},
            "SPREAD" if self.deploy.placement == "spread" else "DEFAULT",
        )

    def updated(self, config: SluiceConfig) -> "DeploymentPlan":
        """Return the plan by ``config``, which may change whatever only workers go by.

        Raises:
            ConfigError: it changes what holds for the deployment's life; names the section.
        """
        for section in LASTING:
            if self._lasting(config, section) != self._lasting(self.config, section):
                raise ConfigError(
                    f"{section}: cannot change while the deployment runs; start it anew, "
                    "or update with the section as it was"
                )
        old, new = self.config.model, config.model
        for name in ("model", "revision", "served_name"):
            if getattr(old, name) != getattr(new, name):
                raise ConfigError(
                    f"model.{name}={getattr(new, name)!r}: clients know the deployment by its "
                    "model; start another deployment for another one"
                )
        deploy = config.deploy.model_copy(
            update={"prefill": self.deploy.prefill, "decode": self.deploy.decode}
        )
        return replace(self, config=config.model_copy(update={"deploy": deploy}))

    def _lasting(self, config: SluiceConfig, section: str) -> dict[str, object]:
        """Return the fields of ``section`` less what is settled at the start or elsewhere."""
        if section == "router" and not self.own_router:
            return {"control_address": config.router.control_address}
        content = getattr(config, section).model_dump()
        settled = {"router": ("port", "control_port"), "deploy": ("prefill", "decode")}
        for name in settled.get(section, ()):
            del content[name]
        return content
