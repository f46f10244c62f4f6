"""One peer that is read from over UCX: its worker, its endpoint, and the way its bytes take."""

from dataclasses import dataclass
from typing import Final

from core.messages import PoolEndpoint
from transfer.descriptors import Pool
from transfer.process_reads import open_process_reads
from transfer.transport import Path
from transfer.ucx_bindings import FAIL_FATAL, FAIL_PEER, UcxStatusError
from transfer.ucx_contexts import UcxContexts
from transfer.ucx_paths import path_of
from transfer.ucx_reads import (
    DEVICE_WINDOW,
    SYNCHRONOUS_WINDOW,
    MessageReads,
    OneSidedReads,
    UcxReads,
)
from transfer.ucx_wire import PoolAddress
from transfer.ucx_worker import UcxContext, UcxWorker

_LOCAL: Final = frozenset({"shared_memory", "cuda_ipc"})
_REMOTE: Final = frozenset({"rdma"})
_BY_KERNEL: Final = "cma"
"""UCX's name of what ``ProcessReads`` does for many extents at once."""


@dataclass(slots=True)
class UcxPeer:
    """Everything of one peer."""

    worker: UcxWorker
    endpoint: int
    error_mode: int
    pool: Pool
    path: Path
    reads: UcxReads

    def destroy(self) -> None:
        """End all reads. On return nothing of them is written any more."""
        if self.error_mode == FAIL_PEER:
            self.worker.disconnect(self.endpoint)
        self.reads.release()
        self.worker.destroy()


def open_peer(
    contexts: UcxContexts,
    source: PoolAddress,
    endpoint: PoolEndpoint,
    pool: Pool,
    *,
    is_local: bool,
) -> UcxPeer:
    """Connect a worker to ``source``, one-sided where the path allows it, to read into ``pool``.

    Raises:
        UcxStatusError: it cannot be reached.
    """
    if contexts.one_sided is not None:
        # UCX offers shared memory to endpoints without error handling only.
        mode, kinds = (FAIL_FATAL, _LOCAL) if is_local else (FAIL_PEER, _REMOTE)
        peer = _try_one_sided(contexts.one_sided, source, endpoint, pool, mode, kinds)
        if peer is not None:
            return peer
    worker = contexts.messages.open_worker()
    try:
        to_source = worker.connect(source.worker, FAIL_PEER)
        path = path_of(worker.lanes(to_source), pool.memory, is_by_message=True)
    except UcxStatusError:
        worker.destroy()
        raise
    reads = MessageReads(worker, to_source, source, pool, endpoint.base_address)
    return UcxPeer(worker, to_source, FAIL_PEER, _remote(endpoint, pool), path, reads)


def _try_one_sided(
    context: UcxContext,
    source: PoolAddress,
    endpoint: PoolEndpoint,
    pool: Pool,
    error_mode: int,
    kinds: frozenset[str],
) -> UcxPeer | None:
    """Return a peer that is read by a path of one of ``kinds``, or None: there is no such path."""
    worker = context.open_worker()
    try:
        to_source = worker.connect(source.worker, error_mode)
        lanes = worker.lanes(to_source)
        path = path_of(lanes, pool.memory)
        if path.kind in kinds:
            remote = _remote(endpoint, pool)
            reads: UcxReads | None = None
            if path.kind == "shared_memory" and any(name == _BY_KERNEL for name, _ in lanes):
                reads = open_process_reads(worker, source.owner, remote)
            if reads is None:
                window = DEVICE_WINDOW if path.kind == "rdma" else SYNCHRONOUS_WINDOW
                reads = OneSidedReads(worker, to_source, source, pool, window)
            return UcxPeer(worker, to_source, error_mode, remote, path, reads)
    except UcxStatusError:
        pass  # No common device, or a key of another kind of memory.
    worker.destroy()
    return None


def _remote(endpoint: PoolEndpoint, pool: Pool) -> Pool:
    return Pool(endpoint.base_address, endpoint.nbytes, pool.memory)
