"""Types of the part of NIXL's C++ bindings that ``nixl_transport`` calls, and their loading.

The package's own Python layer is left out: it logs errors and returns None, and prints to stdout.
"""

import importlib
import logging
import os
from collections.abc import Mapping
from typing import Any, Final, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from core.errors import ConfigError
from transfer.transport import MemoryKind

_QUIET_ENVIRONMENT: Final = {
    # The C++ side writes to stderr by itself, for expected ends of a peer too. What matters is in
    # the errors that the adapter raises; a set variable wins, for debugging.
    "NIXL_LOG_LEVEL": "FATAL",
    "UCX_LOG_LEVEL": "fatal",
    "UCX_WARN_UNUSED_ENV_VARS": "n",
    # UCX would otherwise install handlers of SIGSEGV and the like into the whole process.
    "UCX_HANDLE_ERRORS": "none",
}


class Agent(Protocol):
    """``nixlAgent``: one UCX context and worker. Its destructor destroys both."""

    def createBackend(self, name: str, parameters: Mapping[str, str]) -> int: ...  # noqa: N802, D102
    def registerMem(self, descriptors: object) -> object: ...  # noqa: N802, D102
    def getLocalMD(self) -> bytes: ...  # noqa: N802, D102
    def loadRemoteMD(self, metadata: bytes) -> bytes: ...  # noqa: N802, D102
    def createXferReq(  # noqa: N802, D102
        self, operation: object, local: object, remote: object, remote_agent: str, notif_msg: str
    ) -> int: ...
    def postXferReq(self, handle: int, notif_msg: str) -> object: ...  # noqa: N802, D102
    def getXferStatus(self, handle: int) -> object: ...  # noqa: N802, D102
    def releaseXferReq(self, handle: int) -> object: ...  # noqa: N802, D102
    def getNotifs(self, notifications: dict[str, list[bytes]]) -> object: ...  # noqa: N802, D102


class Bindings:
    """The loaded module: constructors, constants and error types."""

    def __init__(self, module: Any) -> None:  # noqa: ANN401 - a C++ module without stubs
        self._module = module
        self.success: Final[object] = module.NIXL_SUCCESS
        self.in_progress: Final[object] = module.NIXL_IN_PROG
        self.read: Final[object] = module.NIXL_READ
        self.errors: Final = tuple(
            cast("type[Exception]", getattr(module, name))
            for name in dir(module)
            if name.endswith("Error")
        )

    def agent(self, name: str) -> Agent:
        """Return a new agent without a progress thread: that thread would spin a core."""
        config = self._module.nixlAgentConfig(False)  # noqa: FBT003 - positional in the bindings
        return cast("Agent", self._module.nixlAgent(name, config))

    def registration(self, address: int, nbytes: int, memory: MemoryKind) -> object:
        """Return the descriptor list that registers one range of memory."""
        return self._module.nixlRegDList(self._segment(memory), [(address, nbytes, 0, "")])

    def descriptors(self, rows: NDArray[np.uint64], memory: MemoryKind) -> object:
        """Return the transfer list of ``rows``: [n, 3] of address, bytes, device."""
        return self._module.nixlXferDList(self._segment(memory), rows)

    def _segment(self, memory: MemoryKind) -> object:
        return self._module.VRAM_SEG if memory == "cuda" else self._module.DRAM_SEG


def load_bindings() -> Bindings:
    """Load NIXL quietly.

    Raises:
        ConfigError: it is not installed, or its libraries do not load here.
    """
    for name, value in _QUIET_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    raise_exceptions = logging.raiseExceptions
    try:
        module = importlib.import_module("nixl_cu12._bindings")
    except ImportError as error:
        raise ConfigError(
            f"transport nixl cannot be loaded ({error}); install nixl-cu12"
        ) from error
    finally:
        # The package's import switches this off for the whole process.
        logging.raiseExceptions = raise_exceptions
    return Bindings(module)


def status_name(status: object) -> str:
    """Return how NIXL names a status code."""
    return str(getattr(status, "name", status))
