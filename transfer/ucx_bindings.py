"""The part of libucp's C interface that is used here, typed. Field by field as in ``ucp.h``."""

import ctypes
from ctypes import (
    CFUNCTYPE,
    POINTER,
    Structure,
    byref,
    c_char,
    c_char_p,
    c_int,
    c_int8,
    c_size_t,
    c_uint,
    c_uint8,
    c_uint32,
    c_uint64,
    c_void_p,
)
from typing import Any, ClassVar, Final

from core.errors import TransferError
from transfer.ucx_library import UcxLibrary

OK: Final = 0
IN_PROGRESS: Final = 1
BUSY: Final = -15

MESSAGES: Final = 1 << 0 | 1 << 4
"""Tagged messages; both with wake-up."""
REMOTE_MEMORY: Final = 1 << 1 | 1 << 4
API_VERSION: Final = (1, 15)

HOST_MEMORY: Final = 0
CUDA_MEMORY: Final = 1
FAIL_FATAL: Final = 0
"""Error handling ``none``: failures of a request are its status; the peer's end is not noticed."""
FAIL_PEER: Final = 1
"""Error handling ``peer``: the endpoint fails when its peer ends, and the process lives on."""

EXACT_TAG: Final = 2**64 - 1
CONTIGUOUS: Final = 8
SCATTERED: Final = 2
"""Data types: bytes in one run; an array of (address, length)."""
_FIRST_ERROR_POINTER: Final = 2**64 - 256

ErrorCallback = CFUNCTYPE(None, c_void_p, c_void_p, c_int8)


class ContextParams(Structure):
    """``ucp_params_t``."""

    FEATURES: ClassVar = 1 << 0
    _fields_ = (
        ("field_mask", c_uint64),
        ("features", c_uint64),
        ("request_size", c_size_t),
        ("request_init", c_void_p),
        ("request_cleanup", c_void_p),
        ("tag_sender_mask", c_uint64),
        ("mt_workers_shared", c_int),
        ("estimated_num_eps", c_size_t),
        ("estimated_num_ppn", c_size_t),
        ("name", c_char_p),
        ("node_local_id", c_size_t),
    )


class WorkerParams(Structure):
    """``ucp_worker_params_t``."""

    _fields_ = (
        ("field_mask", c_uint64),
        ("thread_mode", c_int),
        ("cpu_mask", c_uint8 * 128),
        ("events", c_uint),
        ("user_data", c_void_p),
        ("event_fd", c_int),
        ("flags", c_uint64),
        ("name", c_char_p),
        ("am_alignment", c_size_t),
        ("client_id", c_uint64),
    )


class EndpointParams(Structure):
    """``ucp_ep_params_t``."""

    ADDRESS: ClassVar = 1 << 0
    ERROR_MODE: ClassVar = 1 << 1
    ERROR_HANDLER: ClassVar = 1 << 2
    _fields_ = (
        ("field_mask", c_uint64),
        ("address", c_char_p),
        ("err_mode", c_int),
        ("err_handler", ErrorCallback),
        ("err_handler_arg", c_void_p),
        ("user_data", c_void_p),
        ("flags", c_uint),
        ("sockaddr", c_void_p),
        ("sockaddr_length", c_uint32),
        ("conn_request", c_void_p),
        ("name", c_char_p),
        ("local_sockaddr", c_void_p),
        ("local_sockaddr_length", c_uint32),
    )


class TransportEntry(Structure):
    """``ucp_transport_entry_t``."""

    _fields_ = (("transport_name", c_char_p), ("device_name", c_char_p))


class EndpointAttributes(Structure):
    """``ucp_ep_attr_t``."""

    TRANSPORTS: ClassVar = 1 << 3
    _fields_ = (
        ("field_mask", c_uint64),
        ("name", c_char * 32),
        ("local_sockaddr", c_uint8 * 128),
        ("remote_sockaddr", c_uint8 * 128),
        ("entries", POINTER(TransportEntry)),
        ("num_entries", c_uint),
        ("entry_size", c_size_t),
        ("user_data", c_void_p),
    )


class MemoryParams(Structure):
    """``ucp_mem_map_params_t``."""

    ADDRESS_LENGTH_TYPE: ClassVar = 1 << 0 | 1 << 1 | 1 << 4
    _fields_ = (
        ("field_mask", c_uint64),
        ("address", c_void_p),
        ("length", c_size_t),
        ("flags", c_uint),
        ("prot", c_uint),
        ("memory_type", c_int),
        ("exported_memh_buffer", c_void_p),
    )


class RequestParams(Structure):
    """``ucp_request_param_t``."""

    DATATYPE: ClassVar = 1 << 3
    FLAGS: ClassVar = 1 << 4
    MEMORY_TYPE: ClassVar = 1 << 6
    MEMORY_HANDLE: ClassVar = 1 << 8
    NOT_AT_ONCE: ClassVar = 1 << 16
    _fields_ = (
        ("op_attr_mask", c_uint32),
        ("flags", c_uint32),
        ("request", c_void_p),
        ("callback", c_void_p),
        ("datatype", c_uint64),
        ("user_data", c_void_p),
        ("reply_buffer", c_void_p),
        ("memory_type", c_int),
        ("recv_info", c_void_p),
        ("memh", c_void_p),
        ("remote_datatype", c_uint64),
        ("remote", c_void_p),
        ("remote_count", c_size_t),
    )


class TagInfo(Structure):
    """``ucp_tag_recv_info_t``."""

    _fields_ = (("sender_tag", c_uint64), ("length", c_size_t))


class UcxStatusError(TransferError):
    """A call of libucp failed."""


_STATUS, _HANDLE = c_int8, c_void_p
_SHORT_CALLS: Final[dict[str, tuple[Any, tuple[Any, ...]]]] = {
    "ucp_get_nbx": (_HANDLE, (_HANDLE, c_void_p, c_size_t, c_uint64, _HANDLE, c_void_p)),
    "ucp_tag_send_nbx": (_HANDLE, (_HANDLE, c_void_p, c_size_t, c_uint64, c_void_p)),
    "ucp_tag_recv_nbx": (_HANDLE, (_HANDLE, c_void_p, c_size_t, c_uint64, c_uint64, c_void_p)),
    "ucp_tag_probe_nb": (_HANDLE, (_HANDLE, c_uint64, c_uint64, c_int, c_void_p)),
    "ucp_tag_msg_recv_nbx": (_HANDLE, (_HANDLE, c_void_p, c_size_t, _HANDLE, c_void_p)),
    "ucp_tag_recv_request_test": (_STATUS, (_HANDLE, c_void_p)),
    "ucp_request_check_status": (_STATUS, (_HANDLE,)),
    "ucp_request_free": (None, (_HANDLE,)),
    "ucp_worker_arm": (_STATUS, (_HANDLE,)),
    "ucp_worker_get_efd": (_STATUS, (_HANDLE, c_void_p)),
    "ucp_worker_get_address": (_STATUS, (_HANDLE, c_void_p, c_void_p)),
    "ucp_worker_release_address": (None, (_HANDLE, _HANDLE)),
    "ucp_ep_query": (_STATUS, (_HANDLE, c_void_p)),
    "ucp_ep_close_nbx": (_HANDLE, (_HANDLE, c_void_p)),
    "ucp_ep_rkey_unpack": (_STATUS, (_HANDLE, c_char_p, c_void_p)),
    "ucp_rkey_destroy": (None, (_HANDLE,)),
    "ucp_rkey_pack": (_STATUS, (_HANDLE, _HANDLE, c_void_p, c_void_p)),
    "ucp_rkey_buffer_release": (None, (_HANDLE,)),
    "ucp_config_read": (_STATUS, (c_char_p, c_char_p, c_void_p)),
    "ucp_config_modify": (_STATUS, (_HANDLE, c_char_p, c_char_p)),
    "ucp_config_release": (None, (_HANDLE,)),
}
_LONG_CALLS: Final[dict[str, tuple[Any, tuple[Any, ...]]]] = {
    "ucp_init_version": (_STATUS, (c_uint, c_uint, c_void_p, _HANDLE, c_void_p)),
    "ucp_cleanup": (None, (_HANDLE,)),
    "ucp_mem_map": (_STATUS, (_HANDLE, c_void_p, c_void_p)),
    "ucp_mem_unmap": (_STATUS, (_HANDLE, _HANDLE)),
    "ucp_worker_create": (_STATUS, (_HANDLE, c_void_p, c_void_p)),
    "ucp_worker_destroy": (None, (_HANDLE,)),
    "ucp_worker_progress": (c_uint, (_HANDLE,)),
    "ucp_ep_create": (_STATUS, (_HANDLE, c_void_p, c_void_p)),
}


class Ucp:
    """The functions by their names in ``ucp.h``, and the decoding of what they return."""

    def __init__(self, library: UcxLibrary) -> None:
        self.library = library
        self._status_text: Any = library.holding.ucs_status_string
        self._status_text.restype, self._status_text.argtypes = c_char_p, (c_int8,)
        for loaded, calls in (
            (library.holding, _SHORT_CALLS),
            (library.releasing, _LONG_CALLS),
        ):
            for name, (result, arguments) in calls.items():
                function = getattr(loaded, name)
                function.restype, function.argtypes = result, arguments

    def short(self, name: str) -> Any:  # noqa: ANN401 - a C function
        """Return a function that is called with the interpreter held."""
        return getattr(self.library.holding, name)

    def long(self, name: str) -> Any:  # noqa: ANN401 - a C function
        """Return a function that lets other Python threads run."""
        return getattr(self.library.releasing, name)

    def text(self, status: int) -> str:
        """Return UCX's words for a status."""
        return bytes(self._status_text(status)).decode()

    def check(self, status: int, what: str) -> None:
        """Raise ``UcxStatusError`` unless ``status`` is OK."""
        if status != OK:
            raise UcxStatusError(f"{what}: {self.text(status)}")

    def request(self, pointer: int | None, what: str) -> int | None:
        """Return the request that a call began; None: it is complete already.

        Raises:
            UcxStatusError: the call failed.
        """
        if pointer is not None and pointer >= _FIRST_ERROR_POINTER:
            raise UcxStatusError(f"{what}: {self.text(pointer - 2**64)}")
        return pointer

    def require_request(self, pointer: int | None, what: str) -> int:
        """Return the request of a call that never completes at once.

        Raises:
            UcxStatusError: the call failed.
        """
        request = self.request(pointer, what)
        if request is None:
            raise UcxStatusError(f"{what}: complete without a request")
        return request

    def handle(self, what: str, function: Any, *arguments: object) -> int:  # noqa: ANN401 - as above
        """Call a constructor whose last parameter is where the new handle goes; return it."""
        handle = c_void_p()
        self.check(function(*arguments, byref(handle)), what)
        return int(handle.value or 0)

    def packed(self, what: str, function: Any, *arguments: object) -> tuple[int, bytes]:  # noqa: ANN401 - as above
        """Call a function that returns a buffer of its own; return its address, and a copy."""
        buffer, length = c_void_p(), c_size_t()
        self.check(function(*arguments, byref(buffer), byref(length)), what)
        return int(buffer.value or 0), ctypes.string_at(buffer, length.value)
