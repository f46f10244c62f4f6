"""NIXL's bindings with a pause in each agent's progress thread."""

from nixl_cu12 import _bindings
from nixl_cu12._bindings import *  # noqa: F403
from nixl_cu12._bindings import nixlAgentConfig, nixlXferTelemetry

PAUSE_US = 500

__all__ = ["PausingAgentConfig", "nixlXferTelemetry"]


class PausingAgentConfig(nixlAgentConfig):
    """An agent's config whose progress thread pauses, whatever its user sets."""

    def __setattr__(self, name: str, value: object) -> None:
        super().__setattr__(name, PAUSE_US if name == "pthrDelay" else value)


_bindings.nixlAgentConfig = PausingAgentConfig
