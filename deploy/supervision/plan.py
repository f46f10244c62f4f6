"""A deployment's plan: what each of its services is started with, now and at every later start."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from core.channel import DeploymentKeys
from core.config import DeployConfig, SluiceConfig
from core.errors import ConfigError
from core.ids import WorkerId
from core.logs import LogFormat
from core.messages import Party, Role
from core.worker_context import WorkerContext
from deploy.config.advice import memory_advice
from deploy.doctor.machine import Machine
from deploy.supervision.changes import deploy_settings_of, refuse_fixed
from deploy.supervision.launch import Launch
from deploy.supervision.placement import router_bundle, worker_bundle
from deploy.supervision.service_names import worker_name
from deploy.supervision.services import RouterService, WorkerService
from engine.threads import thread_environment
from router.server import RouterContext

NOT_OF_A_WORKER = {"router", "security", "deploy", "prefill", "decode"}
"""Sections that change nothing in a worker's process, but for the fields that ``changes`` names."""


@dataclass(frozen=True, slots=True)
class DeploymentPlan:
    """Of one router and two fleets. See ``deploy.supervision.launch.Plan``."""

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

    @property
    def control_port(self) -> int:
        """Where a router of its own listens for workers."""
        return int(self.router_address.rpartition(":")[2])

    def replicas(self) -> Mapping[Party, int]:
        """Return how many of each role there are at the start."""
        workers: dict[Party, int] = {**self.deploy.counts}
        return {"router": 1, **workers} if self.own_router else workers

    def revision(self, role: Party) -> str:
        """Return a short name of what ``role`` runs by: of equal settings, an equal one."""
        if role == "router":
            return "router"
        own = self.config.for_role(role)
        content: dict[str, object] = own.model_dump(mode="json", exclude=NOT_OF_A_WORKER)
        content["deploy"] = deploy_settings_of(own, role)
        if not self.own_router:
            content["router_address"] = self.router_address
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:8]

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
            control_port=self.control_port,
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

    def check(self) -> None:
        """Refuse what the controller would meet only when it starts a worker, and end by.

        Raises:
            ConfigError: no worker could be started.
        """
        roles: tuple[Role, ...] = ("prefill", "decode")
        for role in roles:
            self.launch(role, worker_name(role, 0))

    def advice(self, replicas: Mapping[Party, int]) -> str:
        """Return what is unwise in so many of each role, in one line; "": nothing."""
        if not self.private:
            return ""
        deploy = self.deploy.model_copy(
            update={role: replicas.get(role, 0) for role in ("prefill", "decode")}
        )
        config = self.config.model_copy(update={"deploy": deploy})
        return "; ".join(advice.text for advice in memory_advice(config, Machine()))

    def updated(self, config: SluiceConfig) -> "DeploymentPlan":
        """Return the plan by ``config``, with as many workers as before.

        Raises:
            ConfigError: it changes what holds for the deployment's life, or no worker could be
                started by it; names the fields.
        """
        plan = self._changed(config)
        plan.check()
        return plan

    def _changed(self, config: SluiceConfig) -> "DeploymentPlan":
        refuse_fixed(self.config, config, own_router=self.own_router)
        kept: dict[str, object] = {
            "deploy": config.deploy.model_copy(
                update={"prefill": self.deploy.prefill, "decode": self.deploy.decode}
            )
        }
        if self.own_router:
            kept["router"] = self.config.router  # with the ports that were found for it
            return replace(self, config=config.model_copy(update=kept))
        address = config.router.control_address
        if address is None:
            raise ConfigError(
                "router.control_address: not given, so the workers would have no router to report "
                f"to; write {self.router_address} again, or another address"
            )
        return replace(self, config=config.model_copy(update=kept), router_address=address)
