"""UCX contexts, workers and endpoints as objects with an end.

A worker is the unit of proof: requests live in it, and after ``destroy`` nothing of them is read or
written any more, whatever the other side does.
"""

import ctypes
import os
import time
from collections.abc import Mapping
from enum import Enum, auto
from typing import Any, Final

from core.errors import ConfigError
from transfer.transport import MemoryKind
from transfer.ucx_bindings import (
    API_VERSION,
    BUSY,
    CUDA_MEMORY,
    HOST_MEMORY,
    MESSAGES,
    OK,
    REMOTE_MEMORY,
    SCATTERED,
    ContextParams,
    EndpointAttributes,
    EndpointParams,
    ErrorCallback,
    MemoryParams,
    RequestParams,
    TransportEntry,
    Ucp,
    UcxStatusError,
    WorkerParams,
)

_MAX_LANES: Final = 16
_CLOSE_BY_FORCE: Final = 1

MEMORY_TYPES: Final[Mapping[MemoryKind, int]] = {"host": HOST_MEMORY, "cuda": CUDA_MEMORY}


class UcxContext:
    """One opening of the devices, with at most one registered pool."""

    def __init__(
        self,
        ucp: Ucp,
        options: Mapping[str, str],
        *,
        features: int = MESSAGES | REMOTE_MEMORY,
        transports: str | None = None,
    ) -> None:
        """Open the devices.

        Args:
            ucp: The library.
            options: Settings without their ``UCX_`` prefix. An environment variable of the same
                name wins.
            features: What its workers can do, and do for whoever reaches them.
            transports: ``UCX_TLS``, whatever ``options`` and the environment say.

        Raises:
            ConfigError: a setting is unknown or wrong, or no device can be opened.
        """
        self.ucp = ucp
        self._workers: set[UcxWorker] = set()
        self._memory: int | None = None
        try:
            config = ucp.handle("ucp_config_read", ucp.short("ucp_config_read"), None, None)
            settings = {key: of for key, of in options.items() if f"UCX_{key}" not in os.environ}
            if transports is not None:
                settings["TLS"] = transports
            for key, value in settings.items():
                status = ucp.short("ucp_config_modify")(config, key.encode(), value.encode())
                ucp.check(status, f"setting {key}={value}")
            params = ContextParams(field_mask=ContextParams.FEATURES, features=features)
            init = ucp.long("ucp_init_version")
            self.handle = ucp.handle("ucp_init", init, *API_VERSION, ctypes.byref(params), config)
            ucp.short("ucp_config_release")(config)
        except UcxStatusError as error:
            raise ConfigError(f"transport ucx: {error}; check the UCX_ variables") from error

    def map_memory(self, address: int, nbytes: int, memory: MemoryKind) -> bytes:
        """Register the pool and return the key with which a peer reads it.

        Raises:
            UcxStatusError: a device refuses it.
        """
        ucp = self.ucp
        params = MemoryParams(
            field_mask=MemoryParams.ADDRESS_LENGTH_TYPE,
            address=address,
            length=nbytes,
            memory_type=MEMORY_TYPES[memory],
        )
        map_memory = ucp.long("ucp_mem_map")
        self._memory = ucp.handle("ucp_mem_map", map_memory, self.handle, ctypes.byref(params))
        pack = ucp.short("ucp_rkey_pack")
        buffer, key = ucp.packed("ucp_rkey_pack", pack, self.handle, self._memory)
        ucp.short("ucp_rkey_buffer_release")(buffer)
        return key

    @property
    def memory(self) -> int | None:
        """Handle of the registered pool."""
        return self._memory

    def open_worker(self) -> "UcxWorker":
        """Return a new worker."""
        worker = UcxWorker(self)
        self._workers.add(worker)
        return worker

    def forget(self, worker: "UcxWorker") -> None:
        """``worker`` has been destroyed."""
        self._workers.discard(worker)

    def close(self) -> None:
        """Destroy what is left of the workers, unregister the pool, close the devices."""
        for worker in list(self._workers):
            worker.destroy()
        if self._memory is not None:
            self.ucp.long("ucp_mem_unmap")(self.handle, self._memory)
            self._memory = None
        self.ucp.long("ucp_cleanup")(self.handle)


class _Wait(Enum):
    """What has to come before anybody may wait for a worker."""

    TOUCHED = auto()
    """Progress."""
    DRAINED = auto()
    """Arming: its last progress found nothing, and nothing was posted since."""
    ARMED = auto()


class UcxWorker:
    """One progress engine, and what lives in it: endpoints and requests."""

    def __init__(self, context: UcxContext) -> None:
        ucp = context.ucp
        self.context = context
        self.failed_endpoints: list[tuple[int, str]] = []
        """Endpoints whose peer has ended, and why; filled by ``progress``, emptied by the owner."""
        self._on_failure = ErrorCallback(self._record_failure)
        params = WorkerParams(field_mask=0)
        create = ucp.long("ucp_worker_create")
        self.handle = ucp.handle("worker", create, context.handle, ctypes.byref(params))
        descriptor = ctypes.c_int()
        get_descriptor = ucp.short("ucp_worker_get_efd")
        ucp.check(get_descriptor(self.handle, ctypes.byref(descriptor)), "wake-up")
        self.descriptor = descriptor.value
        self._progress: Any = ucp.long("ucp_worker_progress")
        self._arm: Any = ucp.short("ucp_worker_arm")
        self._state = _Wait.TOUCHED

    def address(self) -> bytes:
        """Return what a peer connects to."""
        ucp = self.context.ucp
        get_address = ucp.short("ucp_worker_get_address")
        buffer, address = ucp.packed("address", get_address, self.handle)
        ucp.short("ucp_worker_release_address")(self.handle, buffer)
        return address

    def connect(self, address: bytes, error_mode: int) -> int:
        """Return a new endpoint to the worker at ``address``.

        Raises:
            UcxStatusError: it cannot be reached.
        """
        params = EndpointParams(
            field_mask=(
                EndpointParams.ADDRESS | EndpointParams.ERROR_MODE | EndpointParams.ERROR_HANDLER
            ),
            address=address,
            err_mode=error_mode,
            err_handler=self._on_failure,
        )
        self.touch()
        ucp = self.context.ucp
        create = ucp.long("ucp_ep_create")
        return ucp.handle("endpoint", create, self.handle, ctypes.byref(params))

    def lanes(self, endpoint: int) -> list[tuple[str, str]]:
        """Return the transports and devices that ``endpoint`` uses."""
        entries = (TransportEntry * _MAX_LANES)()
        attributes = EndpointAttributes(
            field_mask=EndpointAttributes.TRANSPORTS,
            entries=entries,
            num_entries=_MAX_LANES,
            entry_size=ctypes.sizeof(TransportEntry),
        )
        ucp = self.context.ucp
        ucp.check(ucp.short("ucp_ep_query")(endpoint, ctypes.byref(attributes)), "lanes")
        return [
            (entry.transport_name.decode(), entry.device_name.decode())
            for entry in entries[: attributes.num_entries]
        ]

    def disconnect(self, endpoint: int) -> int | None:
        """Close an endpoint at once, failing its requests; return the request that ends with it."""
        params = RequestParams(op_attr_mask=RequestParams.FLAGS, flags=_CLOSE_BY_FORCE)
        self.touch()
        ucp = self.context.ucp
        request = ucp.short("ucp_ep_close_nbx")(endpoint, ctypes.byref(params))
        try:
            return ucp.request(request, "close")
        except UcxStatusError:
            return None  # It had failed: there is nothing left of it.

    def progress(self, *, limit_s: float) -> bool:
        """Move bytes until nothing is left to do now, or ``limit_s`` are over.

        Returns:
            Whether there was anything to do.
        """
        self._state = _Wait.DRAINED
        if not self._progress(self.handle):
            return False
        deadline = time.perf_counter() + limit_s
        while self._progress(self.handle):
            if time.perf_counter() >= deadline:
                self._state = _Wait.TOUCHED
                break
        return True

    def touch(self) -> None:
        """Something was posted: it may have to make progress before anything wakes it."""
        self._state = _Wait.TOUCHED

    @property
    def needs_progress(self) -> bool:
        """Whether ``arm`` refuses until ``progress`` was called."""
        return self._state is _Wait.TOUCHED

    def arm(self) -> bool:
        """Make the descriptor readable from the next event on; False: ``progress`` has to be first.

        UCX holds some of its work, such as replies to a connection that is just there, back until
        the next progress, and no event tells of it.

        Raises:
            UcxStatusError: the devices cannot wake anybody.
        """
        if self._state is _Wait.DRAINED:
            status = self._arm(self.handle)
            if status not in (OK, BUSY):
                self.context.ucp.check(status, "wake-up")
            self._state = _Wait.ARMED if status == OK else _Wait.TOUCHED
        return self._state is _Wait.ARMED

    def destroy(self) -> None:
        """End everything that lives in the worker. On return none of it happens any more."""
        if self.handle:
            self.context.ucp.long("ucp_worker_destroy")(self.handle)
            self.handle = 0
            self.context.forget(self)

    def _record_failure(self, _: int | None, endpoint: int | None, status: int) -> None:
        self.failed_endpoints.append((endpoint or 0, self.context.ucp.text(status)))


def scattered_params(memory: MemoryKind) -> RequestParams:
    """Return the parameters of a message whose buffer is an array of (address, length)."""
    return RequestParams(
        op_attr_mask=RequestParams.DATATYPE | RequestParams.MEMORY_TYPE,
        datatype=SCATTERED,
        memory_type=MEMORY_TYPES[memory],
    )
