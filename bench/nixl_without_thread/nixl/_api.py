"""The API, with agents that make progress only when they are asked to."""

from typing import Any

from nixl_cu12._api import nixl_agent, nixl_prepped_dlist_handle, nixl_xfer_handle
from nixl_cu12._api import nixl_agent_config as agent_config

__all__ = ["nixl_agent", "nixl_agent_config", "nixl_prepped_dlist_handle", "nixl_xfer_handle"]


def nixl_agent_config(**settings: Any) -> agent_config:  # noqa: ANN401 - passed on as they are
    """Return vLLM's agent settings without the progress thread and the pool that relies on it."""
    return agent_config(**{**settings, "enable_prog_thread": False, "num_threads": 0})
