"""Blocks in storage: found, read, verified and written, each within a bound, never raising."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Final, TypeVar

from core.cache_epoch import newest_epoch
from core.errors import ConfigError, StorageError
from core.tiers import BlockName, HostSlot, Tier
from transfer.tiers.breaker import Breaker
from transfer.tiers.chain_search import count_leading
from transfer.tiers.copy_thread import CopyThread
from transfer.tiers.metrics import MoveMetrics
from transfer.tiers.object_storage import BlockStorage
from transfer.tiers.stored_block import is_block, pack, path_of, unpack
from transfer.tiers.trimming import CHECK_FRACTION, surplus

log = logging.getLogger(__name__)
T = TypeVar("T")

CALLS_AT_ONCE: Final = 16
"""Per direction."""
MAX_FAILURES: Final = 8
RETRY_S: Final = 15.0
TRIM_TIMEOUT_S: Final = 120.0


class StorageTier:
    """A storage that may fail, hang, lose and change what it holds, behind calls that cannot.

    Each call takes at most ``timeout_s`` and the time of its copies into slots, which are never
    cut short: when a call has returned, nothing of it writes a slot any more. What is left of a
    write only reads, and is thrown away. After failures in a row the storage is left alone for a
    while.

    Args:
        storage: The objects.
        url: What to call the storage in a message.
        fingerprint: Of model and KV layout; blocks of others are neither found nor read.
        view: The bytes of a host slot, in place.
        timeout_s: Of one call.
        max_nbytes: Of all blocks of this model and layout; None: no bound.
        metrics: Where bytes are counted.
    """

    def __init__(
        self,
        storage: BlockStorage,
        *,
        url: str,
        fingerprint: bytes,
        view: Callable[[HostSlot], memoryview],
        timeout_s: float,
        metrics: MoveMetrics,
        max_nbytes: int | None = None,
    ) -> None:
        self._storage = storage
        self._url = url
        self._fingerprint = fingerprint
        self._view = view
        self._timeout_s = timeout_s
        self._metrics = metrics
        self._max_nbytes = max_nbytes
        self._num_errors = 0
        self._num_unchecked_bytes = 0
        self._trim: asyncio.Task[None] | None = None
        self._epochs = f"{fingerprint.hex()}/epochs"
        self._epoch_due = ""
        self._marking = asyncio.Lock()
        self.epoch_written = ""
        self._clock = asyncio.get_running_loop().time
        self._thread = CopyThread("tier-storage")
        self._reading = asyncio.Semaphore(CALLS_AT_ONCE)
        self._writing = asyncio.Semaphore(CALLS_AT_ONCE)  # apart: a write that hangs stops no read
        self.breaker = Breaker(MAX_FAILURES, RETRY_S)

    async def check(self) -> str:
        """Write and read a small object, and return the epoch that the last reset began; "": none.

        Each reset has an object of its own: one whose writing ends late undoes no newer one.

        Raises:
            ConfigError: the storage cannot be used.
        """
        path = f"{self._fingerprint.hex()}/check"
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._storage.put(path, self._fingerprint)
                found = await self._storage.get(path)
                epochs = await self._storage.list_below(self._epochs)
        except TimeoutError:
            raise ConfigError(
                f"cache.storage_url: {self._url} did not answer within {self._timeout_s} s "
                "(cache.storage_timeout_s)"
            ) from None
        except StorageError as error:
            raise ConfigError(f"cache.storage_url: {self._url} cannot be used: {error}") from error
        if found is None or bytes(found) != self._fingerprint:
            raise ConfigError(
                f"cache.storage_url: {self._url} does not return what was written to it"
            )
        return newest_epoch(each.path.rpartition("/")[2] for each in epochs)

    async def mark_epoch(self, epoch: str) -> bool:
        """Let workers that start later begin with ``epoch``, or a newer one; False: not written.

        One is written at a time, and of those that wait for that only the newest. One that failed
        is tried again before every write, and nothing else is written until then.
        """
        self._epoch_due = max(self._epoch_due, epoch)
        return await self._write_epoch(self._clock() + self._timeout_s)

    async def find(self, names: Sequence[BlockName]) -> int:
        """Return how many of ``names`` are there, from the first on; 0 where nothing is known."""
        deadline = self._clock() + self._timeout_s

        async def exists(index: int) -> bool:
            path = self._path(names[index])
            return await self._call(lambda: self._storage.has(path), self._reading, deadline)

        try:
            return await count_leading(exists, len(names), width=CALLS_AT_ONCE)
        except StorageError as error:
            log.debug("event=storage_find_failed reason=%s", error)
            return 0

    async def read(self, names: Sequence[BlockName], slots: Sequence[HostSlot]) -> list[bool]:
        """Fill ``slots``; return which of them have verified bytes."""
        deadline = self._clock() + self._timeout_s
        before = self._num_errors
        parts = [
            self._read_one(name, slot, deadline) for name, slot in zip(names, slots, strict=True)
        ]
        landed = await asyncio.gather(*parts)
        self._log_failures("read", before)
        return landed

    async def write(self, names: Sequence[BlockName], slots: Sequence[HostSlot]) -> list[bool]:
        """Write ``slots``; return which of them are there for certain."""
        deadline = self._clock() + self._timeout_s
        before = self._num_errors
        if not await self._write_epoch(deadline):
            return [False] * len(names)
        parts = [
            self._write_one(name, slot, deadline) for name, slot in zip(names, slots, strict=True)
        ]
        written = await asyncio.gather(*parts)
        self._trim_if_due()
        self._log_failures("write", before)
        return written

    async def close(self, *, timeout_s: float) -> None:
        """End the copies and a trim."""
        if self._trim is not None:
            self._trim.cancel()
        if not await self._thread.close(timeout_s=timeout_s):
            log.warning("event=storage_thread_hangs")

    def _trim_if_due(self) -> None:
        """Look at the whole after so many bytes of our own; others look after theirs."""
        if self._max_nbytes is None or (self._trim is not None and not self._trim.done()):
            return
        if self._num_unchecked_bytes >= CHECK_FRACTION * self._max_nbytes:
            self._num_unchecked_bytes = 0
            self._trim = asyncio.create_task(self._trim_to(self._max_nbytes), name="storage-trim")

    async def _trim_to(self, max_nbytes: int) -> None:
        folder = self._fingerprint.hex()
        try:
            async with asyncio.timeout(TRIM_TIMEOUT_S):
                objects = await self._storage.list_below(folder)
                blocks = [each for each in objects if is_block(each.path)]
                paths = surplus(blocks, max_nbytes=max_nbytes)
                await self._storage.delete(paths)
        except (StorageError, TimeoutError) as error:
            log.warning("event=storage_trim_failed reason=%s", error or "no answer in time")
        else:
            log.info("event=storage_trimmed blocks=%d deleted=%d", len(blocks), len(paths))

    async def _write_epoch(self, deadline: float) -> bool:
        """Write what is due. The wait for others ends in time: their deadlines are no later."""
        async with self._marking:
            while epoch := self._epoch_due:
                mark = partial(self._storage.put, f"{self._epochs}/{epoch}", b"")
                try:
                    await self._call(mark, self._writing, deadline)
                except StorageError as error:
                    log.warning("event=storage_epoch_not_written epoch=%s reason=%s", epoch, error)
                    return False
                self.epoch_written = epoch
                if self._epoch_due == epoch:
                    self._epoch_due = ""
            return True

    async def _read_one(self, name: BlockName, slot: HostSlot, deadline: float) -> bool:
        path = self._path(name)
        target = self._view(slot)
        try:
            stored = await self._call(lambda: self._storage.get(path), self._reading, deadline)
            if stored is None:
                return False
            await self._thread.run(
                lambda: unpack(stored, name, target, fingerprint=self._fingerprint)
            )
        except StorageError as error:
            self._num_errors += 1
            log.debug("event=storage_read_failed path=%s reason=%s", path, error)
            return False
        self._metrics.count_bytes(Tier.STORAGE, "in", target.nbytes)
        return True

    async def _write_one(self, name: BlockName, slot: HostSlot, deadline: float) -> bool:
        path = self._path(name)
        source = self._view(slot)

        async def put() -> None:
            content = await self._thread.run(
                lambda: pack(name, source, fingerprint=self._fingerprint)
            )
            await self._storage.put(path, content)

        try:
            await self._call(put, self._writing, deadline)
        except StorageError as error:
            self._num_errors += 1
            log.debug("event=storage_write_failed path=%s reason=%s", path, error)
            return False
        self._metrics.count_bytes(Tier.STORAGE, "out", source.nbytes)
        self._num_unchecked_bytes += source.nbytes
        return True

    async def _call(
        self,
        call: Callable[[], Awaitable[T]],
        gate: AbstractAsyncContextManager[None],
        deadline: float,
    ) -> T:
        """Return the call's result within the deadline.

        Raises:
            StorageError: it failed, did not come back, or was not made.
        """
        if not self.breaker.allows(self._clock()):
            raise StorageError("left alone after failures in a row")
        try:
            async with asyncio.timeout_at(deadline), gate:
                result = await call()
        except TimeoutError:
            self._count_failure("no answer in time")
            raise StorageError(f"no answer within {self._timeout_s} s") from None
        except StorageError as error:
            self._count_failure(str(error))
            raise
        self.breaker.succeeded()
        return result

    def _log_failures(self, what: str, num_errors_before: int) -> None:
        """One line per call, and none while the breaker, which was logged, is open."""
        failed = self._num_errors - num_errors_before
        if failed and not self.breaker.is_open:
            log.warning("event=storage_%s_failed blocks=%d", what, failed)

    def _count_failure(self, reason: str) -> None:
        if self.breaker.failed(self._clock()):
            log.warning("event=storage_left_alone retry_s=%s reason=%s", RETRY_S, reason)

    def _path(self, name: BlockName) -> str:
        return path_of(name, fingerprint=self._fingerprint)
