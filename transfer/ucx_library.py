"""Finding and loading one copy of UCX.

NIXL's wheel is asked first: its UCX carries the InfiniBand and EFA modules, and a process that uses
NIXL too then has one copy only. Handles of one copy hang in another, so everything of this package
comes from the file that is found here.
"""

import ctypes
import ctypes.util
import importlib.util
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from core.errors import ConfigError

LIBRARY_VARIABLE: Final = "SLUICE_UCX_LIBRARY"
"""Names a ``libucp.so`` to use instead of what is found, such as a node's own build."""

_QUIET_ENVIRONMENT: Final = {
    # UCX writes to stderr by itself, for expected ends of a peer too. What matters is in the
    # errors that the adapters raise; a set variable wins, for debugging.
    "UCX_LOG_LEVEL": "fatal",
    "UCX_WARN_UNUSED_ENV_VARS": "n",
    # UCX would otherwise install handlers of SIGSEGV and the like into the whole process.
    "UCX_HANDLE_ERRORS": "none",
}
_WHEELS: Final = (
    ("nixl_cu12", "../nixl_cu12.libs/libucp-*.so*"),
    ("nixl_cu13", "../nixl_cu13.libs/libucp-*.so*"),
    ("libucx", "lib/libucp.so.0"),
)
_API_MAJOR: Final = 1


def quiet_ucx() -> None:
    """Keep UCX from writing to the terminal and from catching signals. Before it is loaded."""
    for name, value in _QUIET_ENVIRONMENT.items():
        os.environ.setdefault(name, value)


@dataclass(frozen=True, slots=True)
class UcxLibrary:
    """One loaded copy."""

    path: str
    version: str
    releasing: ctypes.CDLL
    """Lets other Python threads run meanwhile: for calls that copy bytes or open devices."""
    holding: ctypes.PyDLL
    """Keeps the interpreter: for short calls, since getting it back may take milliseconds."""

    @property
    def major(self) -> int:
        """Of the version: other majors may speak another wire protocol."""
        return int(self.version.split(".", 1)[0])


def load_ucx() -> UcxLibrary:
    """Load the copy that ``SLUICE_UCX_LIBRARY`` names, or the first that is found.

    Raises:
        ConfigError: there is none, it does not load, or its API is another.
    """
    quiet_ucx()
    path = os.environ.get(LIBRARY_VARIABLE) or next(_candidates(), None)
    if path is None:
        raise ConfigError(
            "transport ucx: libucp is not found; install nixl-cu12, or name the file in "
            f"{LIBRARY_VARIABLE}"
        )
    try:
        releasing, holding = ctypes.CDLL(path), ctypes.PyDLL(path)
        holding.ucp_get_version_string.restype = ctypes.c_char_p
        version = bytes(holding.ucp_get_version_string()).decode()
    except (OSError, AttributeError) as error:
        raise ConfigError(f"transport ucx: {path} cannot be loaded: {error}") from error
    library = UcxLibrary(path, version, releasing, holding)
    if library.major != _API_MAJOR:
        raise ConfigError(f"transport ucx: {path} is UCX {version}; version {_API_MAJOR} is needed")
    return library


def _candidates() -> Iterator[str]:
    for package, pattern in _WHEELS:
        spec = importlib.util.find_spec(package)
        for folder in (spec.submodule_search_locations or ()) if spec else ():
            yield from (str(file) for file in sorted(Path(folder).resolve().glob(pattern)))
    system = ctypes.util.find_library("ucp")
    if system:
        yield system
