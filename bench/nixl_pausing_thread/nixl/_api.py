"""NIXL's API as it is, over the changed bindings."""

from nixl_cu12._api import (
    nixl_agent,
    nixl_agent_config,
    nixl_prepped_dlist_handle,
    nixl_xfer_handle,
)

from nixl import _bindings  # noqa: F401 - changes the config that agents are made with

__all__ = ["nixl_agent", "nixl_agent_config", "nixl_prepped_dlist_handle", "nixl_xfer_handle"]
