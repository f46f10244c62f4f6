"""From a worker's config to the movers of its tiers."""

import hashlib
from collections.abc import Callable
from typing import Protocol

import msgspec
from prometheus_client import CollectorRegistry

from core.config import CacheConfig
from core.kv_layout import KVLayout
from transfer.tiers.metrics import MoveMetrics
from transfer.tiers.mover import TierEvents, TierMemory, TierMover
from transfer.tiers.object_storage import ObjectStorage
from transfer.tiers.storage_tier import StorageTier
from transfer.tiers.stored_block import FINGERPRINT_NBYTES

GIB = 2**30


def storage_fingerprint(layout: KVLayout, *, model_fingerprint: str) -> bytes:
    """Return what tells stored blocks of one model, layout and dtype from all others."""
    content = msgspec.json.encode((model_fingerprint, layout))
    return hashlib.blake2b(content, digest_size=FINGERPRINT_NBYTES).digest()


class WorkerTiers(TierEvents, Protocol):
    """Who decides, and how much host memory that takes."""

    @property
    def num_host_slots(self) -> int:
        """Blocks that host memory must have room for."""
        ...


class WorkerMover:
    """A worker's mover. Where its tiers are off there is none, and every call does nothing."""

    def __init__(self, mover: TierMover | None) -> None:
        self._mover = mover

    async def check(self) -> None:
        """See ``TierMover``."""
        if self._mover is not None:
            await self._mover.check()

    def carry_out(self) -> None:
        """See ``TierMover``."""
        if self._mover is not None:
            self._mover.carry_out()

    async def wait_marked(self, *, timeout_s: float) -> None:
        """See ``TierMover``."""
        if self._mover is not None:
            await self._mover.wait_marked(timeout_s=timeout_s)

    async def close(self, *, timeout_s: float) -> None:
        """See ``TierMover``."""
        if self._mover is not None:
            await self._mover.close(timeout_s=timeout_s)


def open_mover(
    tiers: WorkerTiers | None,
    make_memory: Callable[[int], TierMemory],
    cache: CacheConfig,
    *,
    layout: KVLayout,
    model_fingerprint: str,
    metrics: tuple[CollectorRegistry, str],
    on_change: Callable[[], None],
) -> WorkerMover:
    """Return the mover of one worker. Belongs to the running event loop.

    Args:
        tiers: Who decides; None: they are off.
        make_memory: Returns pool and host memory, the latter with so many slots.
        cache: Which tiers there are, and their bounds.
        layout: Of the pool.
        model_fingerprint: Of what decides the KV.
        metrics: Where to export, and the worker's role.
        on_change: See ``TierMover``.

    Raises:
        ConfigError: the storage's URL cannot be used, or host memory does not fit.
    """
    if tiers is None:
        return WorkerMover(None)
    memory = make_memory(tiers.num_host_slots)
    observed = MoveMetrics(metrics[0], role=metrics[1])
    storage = None
    if cache.storage_url is not None:
        storage = StorageTier(
            ObjectStorage(cache.storage_url, timeout_s=cache.storage_timeout_s),
            url=cache.storage_url,
            fingerprint=storage_fingerprint(layout, model_fingerprint=model_fingerprint),
            view=memory.view,
            timeout_s=cache.storage_timeout_s,
            metrics=observed,
            max_nbytes=None if cache.storage_gib is None else int(cache.storage_gib * GIB),
        )
        breaker = storage.breaker
        observed.gauge(
            "sluice_kv_storage_left_alone",
            "1 while the storage is not called after failures in a row",
            lambda: float(breaker.is_open),
        )
    return WorkerMover(
        TierMover(
            tiers,
            memory,
            block_nbytes=layout.block_nbytes,
            storage=storage,
            metrics=observed,
            on_change=on_change,
        )
    )
