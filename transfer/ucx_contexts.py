"""The two openings of the devices that a process has, so that little of it can be had over TCP.

UCX answers emulated one-sided reads for whoever reaches a worker's TCP port, of any address and
without a key (``ucp_get_req_handler`` in ``rma_sw.c``), if the worker's context has that feature.
So what listens on TCP has messages only, and what reads one-sided has no TCP, and listens nowhere.

What remains is UCX's own: its TCP writes to any address that a packet names
(``uct_tcp_ep_handle_put_req`` in ``tcp_ep.c``), and no setting ends that. ``UCX_TLS=^tcp`` does,
where shared memory or RDMA is enough; elsewhere the network has to keep strangers out.
"""

import logging
import os
from collections.abc import Mapping
from pathlib import Path as FilePath
from typing import Final

from core.errors import ConfigError
from transfer.transport import MemoryKind
from transfer.ucx_bindings import MESSAGES, REMOTE_MEMORY, Ucp
from transfer.ucx_worker import UcxContext

log = logging.getLogger(__name__)

_RDMA_DEVICES: Final = FilePath("/sys/class/infiniband")


class UcxContexts:
    """Messages over anything, and one-sided reads over anything but TCP."""

    def __init__(self, ucp: Ucp, options: Mapping[str, str]) -> None:
        """Open the devices.

        Raises:
            ConfigError: a setting is wrong, or there is no device.
        """
        # With RDMA both sides of a connection must have the same features.
        features = MESSAGES | REMOTE_MEMORY if has_rdma() else MESSAGES
        self.messages = UcxContext(ucp, options, features=features)
        self.one_sided: UcxContext | None = None
        """None: there is nothing but TCP."""
        transports = without_tcp(os.environ.get("UCX_TLS") or options.get("TLS", "all"))
        if transports is None:
            return
        try:
            self.one_sided = UcxContext(
                ucp, options, features=MESSAGES | REMOTE_MEMORY, transports=transports
            )
        except ConfigError as error:
            log.info("one-sided reads are not possible reason=%s", error)

    def register(self, address: int, nbytes: int, memory: MemoryKind) -> bytes:
        """Register the pool and return the key with which a peer reads it one-sided.

        Raises:
            UcxStatusError: a device refuses it.
        """
        if self.one_sided is not None:
            self.one_sided.map_memory(address, nbytes, memory)
        return self.messages.map_memory(address, nbytes, memory)

    def close(self) -> None:
        """Destroy all workers, unregister the pool, close the devices."""
        if self.one_sided is not None:
            self.one_sided.close()
        self.messages.close()


def has_rdma() -> bool:
    """Return whether this machine has any InfiniBand, RoCE or EFA device."""
    return _RDMA_DEVICES.is_dir() and any(_RDMA_DEVICES.iterdir())


def without_tcp(transports: str) -> str | None:
    """Return a value of ``UCX_TLS`` without TCP; None: nothing is left."""
    if transports.startswith("^"):
        return f"{transports},tcp"
    chosen = [name.strip() for name in transports.split(",")]
    if "all" in chosen:
        return "^tcp"
    return ",".join(name for name in chosen if name != "tcp") or None
