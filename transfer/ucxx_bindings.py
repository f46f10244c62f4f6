"""Types of the part of ucxx's low-level interface that ``ucxx_transport`` calls; its loading."""

import importlib
from collections.abc import Mapping
from ctypes import c_uint8
from typing import Any, Final, Protocol

import numpy as np

from core.errors import ConfigError
from transfer.descriptors import Pool
from transfer.ucx_library import quiet_ucx


class Request(Protocol):
    """A message on its way. Dropping it cancels it."""

    completed: bool

    def check_error(self) -> None: ...  # noqa: D102


class Probe(Protocol):
    """Whether a message is waiting, and how long it is."""

    matched: bool
    length: int


class Endpoint(Protocol):
    """One connection of a worker."""

    alive: bool

    def tag_send(self, array: object, tag: object) -> Request: ...  # noqa: D102
    def close_blocking(self) -> None: ...  # noqa: D102


class Worker(Protocol):
    """``UCXWorker``: its destructor destroys the UCX worker, once nothing refers to it."""

    epoll_file_descriptor: int
    address: Any

    def init_blocking_progress_mode(self) -> None: ...  # noqa: D102
    def arm(self) -> bool: ...  # noqa: D102
    def cancel_inflight_requests(self) -> int: ...  # noqa: D102
    def progress_once(self) -> bool: ...  # noqa: D102
    def tag_probe(self, tag: object, *, remove: bool) -> Probe: ...  # noqa: D102
    def tag_recv(self, array: object, tag: object) -> Request: ...  # noqa: D102
    def tag_recv_with_handle(self, array: object, probe: Probe) -> Request: ...  # noqa: D102
    def create_endpoint_from_worker_address(  # noqa: D102
        self,
        address: object,
        endpoint_error_handling: bool,  # noqa: FBT001 - positional in the bindings
    ) -> Endpoint: ...


class _DeviceRange:
    """Device memory by its address, as the CUDA array interface describes it."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__: dict[str, object] = {
            "data": (address, False),
            "shape": (nbytes,),
            "typestr": "|u1",
            "version": 3,
        }


class Bindings:
    """The loaded module: constructors and error types."""

    def __init__(self, library: Any, arrays: Any) -> None:  # noqa: ANN401 - modules without stubs
        self._library = library
        self._array = arrays.Array
        self.errors: Final[tuple[type[Exception], ...]] = (library.UCXError, RuntimeError)

    @property
    def version(self) -> str:
        """Version of UCX."""
        return ".".join(str(part) for part in self._library.get_ucx_version())

    def context(self, options: Mapping[str, str]) -> object:
        """Open the devices."""
        feature = self._library.Feature
        return self._library.UCXContext(dict(options), (feature.TAG, feature.WAKEUP))

    def worker(self, context: object) -> Worker:
        """Return a worker that can be waited for, with no thread of its own."""
        worker: Worker = self._library.UCXWorker(context)
        worker.init_blocking_progress_mode()
        return worker

    def connect(self, worker: Worker, address: bytes) -> Endpoint:
        """Return an endpoint that fails when its peer ends."""
        target = self._library.UCXAddress.create_from_buffer(bytearray(address))
        return worker.create_endpoint_from_worker_address(target, True)  # noqa: FBT003 - as above

    def tag(self, value: int) -> object:
        """Return a tag."""
        return self._library.UCXXTag(value)

    def buffer(self, data: object) -> object:
        """Return what to send or to receive into."""
        return self._array(data)

    def part(self, pool: Pool, address: int, nbytes: int) -> object:
        """Return a part of a pool, to send or to receive into."""
        if pool.memory == "cuda":
            return self._array(_DeviceRange(address, nbytes))
        return self._array(np.ctypeslib.as_array((c_uint8 * nbytes).from_address(address)))


def load_ucxx() -> Bindings:
    """Load ucxx quietly.

    Raises:
        ConfigError: it is not installed, or its libraries do not load here.
    """
    quiet_ucx()
    try:
        importlib.import_module("ucxx")  # Loads its own copy of UCX first.
        library = importlib.import_module("ucxx._lib.libucxx")
        arrays = importlib.import_module("ucxx._lib.arr")
    except ImportError as error:
        raise ConfigError(
            f"transport ucxx cannot be loaded ({error}); pip install 'ucxx-cu12>=0.45', "
            "the extra ucxx, or set transfer.transport: auto"
        ) from error
    return Bindings(library, arrays)
