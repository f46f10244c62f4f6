"""What a deployment is made of: for each role, what to start, with which surroundings."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from core.config import DeployConfig, SluiceConfig
from core.logs import LogFormat
from core.messages import Party
from deploy.supervision.actors import Service
from deploy.supervision.placement import Bundle


@dataclass(frozen=True, slots=True)
class Launch:
    """One service and the surroundings of its process."""

    service: Service
    bundle: Bundle
    environment: Mapping[str, str]
    """Set before the process imports anything."""
    strategy: Any = "DEFAULT"
    """Ray's scheduling strategy."""


class Plan(Protocol):
    """How every service is started. Pickled, so that a new controller goes on with it."""

    @property
    def deploy(self) -> DeployConfig:
        """The settings of supervision."""
        ...

    @property
    def log_level(self) -> str:
        """Of the controller."""
        ...

    @property
    def log_format(self) -> LogFormat:
        """Of the controller."""
        ...

    @property
    def environment(self) -> Mapping[str, str]:
        """Of every process, the controller's too."""
        ...

    def replicas(self) -> Mapping[Party, int]:
        """Return how many of each role there are at the start."""
        ...

    def revision(self, role: Party) -> str:
        """Return a short name of what ``role`` runs by."""
        ...

    def launch(self, role: Party, name: str) -> Launch:
        """Return what to start."""
        ...

    def advice(self, replicas: Mapping[Party, int]) -> str:
        """Return what is unwise in so many of each role, in one line; "": nothing."""
        ...

    def updated(self, config: SluiceConfig) -> "Plan":
        """Return the plan by a new config.

        Raises:
            ConfigError: what cannot change while the deployment runs.
        """
        ...
