"""Which transports and devices a UCX finds on this machine, in its own words."""

import ctypes
import re
from collections.abc import Mapping
from ctypes import c_char_p, c_int, c_void_p
from typing import Final

from core.errors import ConfigError
from transfer.ucx_bindings import Ucp
from transfer.ucx_library import load_ucx
from transfer.ucx_worker import UcxContext

_RESOURCE: Final = re.compile(r"resource\s+\d+\s*:.*\s(\S+/\S+)\s*$", re.MULTILINE)
_MAX_NBYTES: Final = 2**20


def find_devices(options: Mapping[str, str]) -> tuple[str, ...]:
    """Return ``transport/device`` of everything that UCX could use under ``options``.

    Raises:
        ConfigError: UCX cannot be loaded, or opens nothing.
    """
    ucp = Ucp(load_ucx())
    context = UcxContext(ucp, options)
    try:
        return tuple(dict.fromkeys(_RESOURCE.findall(_printed(ucp, context))))
    finally:
        context.close()


def _printed(ucp: Ucp, context: UcxContext) -> str:
    """Return what ``ucp_context_print_info`` writes; it takes a stream of the C library."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.tmpfile.restype = c_void_p
    libc.fflush.argtypes = libc.fclose.argtypes = libc.rewind.argtypes = (c_void_p,)
    libc.fread.argtypes = (c_char_p, ctypes.c_size_t, ctypes.c_size_t, c_void_p)
    libc.fread.restype = ctypes.c_size_t
    stream = libc.tmpfile()
    if not stream:
        raise ConfigError(f"no temporary file: errno {ctypes.get_errno()}; is /tmp writable?")
    try:
        describe = ucp.library.holding.ucp_context_print_info
        describe.restype, describe.argtypes = None, (c_void_p, c_void_p)
        describe(context.handle, stream)
        libc.fflush(stream)
        libc.rewind(stream)
        buffer = ctypes.create_string_buffer(_MAX_NBYTES)
        length: int = libc.fread(buffer, 1, _MAX_NBYTES, stream)
        return buffer.raw[:length].decode(errors="replace")
    finally:
        close = libc.fclose
        close.restype = c_int
        close(stream)
