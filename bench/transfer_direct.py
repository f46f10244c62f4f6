"""What the transfer is held against: a copy from shared memory, NIXL and ``ucp_get`` used directly.

Each reads what a request reads, in one call, and spins until the last byte is there.
"""

import ctypes
from collections.abc import Mapping
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from bench.transfer_memory import POOL_NBYTES, Bytes
from core.messages import PoolEndpoint
from transfer.nixl_bindings import load_bindings
from transfer.ucx_bindings import FAIL_FATAL, IN_PROGRESS, RequestParams, Ucp
from transfer.ucx_library import load_ucx
from transfer.ucx_transport import UCX_OPTIONS
from transfer.ucx_wire import decode_address
from transfer.ucx_worker import UcxContext

Rows = NDArray[np.int64]


class Direct(Protocol):
    """Reads extents, and returns when the last byte is here."""

    def read(self, rows: Rows) -> None:
        """Read what ``rows`` say: [n, 3] of local offset, remote offset, bytes."""
        ...

    def close(self) -> None:
        """Give everything back."""
        ...


class SharedCopy:
    """Copies out of memory that another process has filled."""

    def __init__(self, pool: Bytes, shared: Bytes) -> None:
        self._target, self._source = pool.ctypes.data, shared.ctypes.data
        self._keep = pool, shared

    def read(self, rows: Rows) -> None:
        """See ``Direct``."""
        for local, remote, nbytes in rows.tolist():
            ctypes.memmove(self._target + local, self._source + remote, nbytes)

    def close(self) -> None:
        """See ``Direct``."""
        del self._keep


class DirectNixl:
    """One NIXL agent; a request for each case is made anew, as a request in serving is."""

    def __init__(self, pool: Bytes, endpoint: PoolEndpoint, options: Mapping[str, str]) -> None:
        self._bindings = load_bindings()
        self._agent = self._bindings.agent("direct")
        engine = ",".join(f"{key}={value}" for key, value in options.items())
        self._agent.createBackend("UCX", {"engine_config": engine} if engine else {})
        self._agent.registerMem(self._bindings.registration(pool.ctypes.data, POOL_NBYTES, "host"))
        self._peer = self._agent.loadRemoteMD(endpoint.metadata).decode()
        self._bases = pool.ctypes.data, endpoint.base_address
        self._keep = pool

    def read(self, rows: Rows) -> None:
        """See ``Direct``."""
        bindings, agent = self._bindings, self._agent
        lists: list[object] = []
        for side, base in enumerate(self._bases):
            described = np.zeros((len(rows), 3), dtype=np.uint64)
            described[:, 0] = rows[:, side] + base
            described[:, 1] = rows[:, 2]
            lists.append(bindings.descriptors(described, "host"))
        handle = agent.createXferReq(bindings.read, lists[0], lists[1], self._peer, "")
        status = agent.postXferReq(handle, "")
        while status == bindings.in_progress:
            status = agent.getXferStatus(handle)
        agent.releaseXferReq(handle)
        if status != bindings.success:
            raise RuntimeError(f"NIXL read failed: {status}")

    def close(self) -> None:
        """See ``Direct``."""
        del self._agent


class DirectGet:
    """One worker and one endpoint without error handling: a ``ucp_get_nbx`` for each extent."""

    def __init__(self, pool: Bytes, endpoint: PoolEndpoint, options: Mapping[str, str]) -> None:
        self._ucp = ucp = Ucp(load_ucx())
        self._context = UcxContext(ucp, {**UCX_OPTIONS, **options})
        self._context.map_memory(pool.ctypes.data, POOL_NBYTES, "host")
        source = decode_address(endpoint.metadata)
        self._worker = self._context.open_worker()
        self._endpoint = self._worker.connect(source.worker, FAIL_FATAL)
        unpack = ucp.short("ucp_ep_rkey_unpack")
        self._key = ucp.handle("key", unpack, self._endpoint, source.key)
        self._bases = pool.ctypes.data, endpoint.base_address
        self._params = RequestParams(
            op_attr_mask=RequestParams.MEMORY_HANDLE, memh=self._context.memory
        )
        self._keep = pool

    def read(self, rows: Rows) -> None:
        """See ``Direct``."""
        ucp, params = self._ucp, ctypes.byref(self._params)
        get, check = ucp.short("ucp_get_nbx"), ucp.short("ucp_request_check_status")
        progress, free = ucp.long("ucp_worker_progress"), ucp.short("ucp_request_free")
        to, of = self._bases
        requests: list[int] = []
        for local, remote, nbytes in rows.tolist():
            pointer = get(self._endpoint, to + local, nbytes, of + remote, self._key, params)
            request = ucp.request(pointer, "get")
            if request is not None:
                requests.append(request)
        for request in requests:
            while (status := check(request)) == IN_PROGRESS:
                progress(self._worker.handle)
            free(request)
            ucp.check(status, "get")

    def close(self) -> None:
        """See ``Direct``."""
        self._ucp.short("ucp_rkey_destroy")(self._key)
        self._worker.destroy()
        self._context.close()
