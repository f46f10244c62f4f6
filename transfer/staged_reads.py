"""Reads that are converted on their way: drives ``transfer.conversions`` from the event loop."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from core.errors import HandshakeError
from core.ids import Incarnation, OperationId
from core.kv_unpack import Unpack
from transfer.actions import PostRead
from transfer.conversions import Conversions, Portion, least_staging_nbytes
from transfer.pairing import PairPlan
from transfer.quanta import EndedRead

log = logging.getLogger(__name__)


class Converter(Protocol):
    """Puts what was read in its source's shape into the pool's blocks."""

    @property
    def staging(self) -> range:
        """Where reads put it: offsets in the registered memory, which belong to no block."""
        ...

    def digests(self, work: Unpack) -> Sequence[bytes]:
        """Return a digest of each block of ``work`` as it was staged."""
        ...

    def unpack(self, work: Unpack) -> None:
        """Do it; on return the bytes are in the blocks, for every step from then on."""
        ...


class StagedReads:
    """Posts portions as the staging has room, and unpacks one in each turn of the loop.

    What was read is in the blocks before its read's end is told.
    """

    def __init__(
        self,
        converter: Converter | None,
        *,
        post: Callable[[Portion], None],
        on_end: Callable[[EndedRead], None],
    ) -> None:
        """Convert with ``converter``; without one, nothing can be.

        Args:
            converter: Owns the staging.
            post: Reads a portion; its end is to be told by ``portion_ended``.
            on_end: Is told of each read's end, from the loop or from within a call.
        """
        self._converter = converter
        self._post = post
        self._on_end = on_end
        self._conversions = Conversions(range(0) if converter is None else converter.staging)
        self._arrived: deque[EndedRead] = deque()
        """Portions that are terminal, and have not been looked at."""
        self._loop = asyncio.get_running_loop()
        self._is_closed = False

    def require_room(self, plan: PairPlan) -> None:
        """Refuse a source of which not even one block could be staged.

        Raises:
            HandshakeError: names both sizes and the fix.
        """
        needed, room = least_staging_nbytes(plan), self._conversions.staging_nbytes
        if needed > room:
            raise HandshakeError(
                f"prefill's blocks have another shape and need {needed} bytes of staging, decode "
                f"has {room} (raise transfer.staging_mib on decode, or give both one shape)"
            )

    def connect(self, source: Incarnation, plan: PairPlan) -> None:
        """Reads of ``source`` may come, until it is dropped."""
        self._conversions.connect(source, plan)

    def add(self, read: PostRead, plan: PairPlan) -> None:
        """Carry ``read`` out; it ends once."""
        self._conversions.add(read, plan, time.monotonic())
        self._stage()

    def is_portion(self, operation: OperationId) -> bool:
        """Whether the end of ``operation`` is for ``portion_ended``."""
        return self._conversions.is_portion(operation)

    def read_of(self, operation: OperationId) -> OperationId:
        """Return the read that a portion is of; what is no portion is a read of its own."""
        return self._conversions.read_of(operation)

    def portion_ended(self, end: EndedRead) -> None:
        """A portion is terminal: look at it in the loop's next turn."""
        self._arrived.append(end)
        self._loop.call_soon(self._take_next)

    def cancel(self, operation: OperationId) -> list[OperationId]:
        """Nobody wants a read any more. Return its portions that are posted, or will be."""
        portions, end = self._conversions.cancel(operation)
        if end is not None:
            self._on_end(end)
        return portions

    def drop(self, source: Incarnation, reason: str) -> None:
        """``source`` is lost: its reads fail, as soon as nothing of them is posted any more."""
        for end in self._conversions.drop(source, reason):
            self._on_end(end)

    def close(self) -> None:
        """Unpack nothing more, and tell nobody."""
        self._is_closed = True

    def _stage(self) -> None:
        while (portion := self._conversions.next()) is not None:
            self._post(portion)

    def _take_next(self) -> None:
        end = self._arrived.popleft()
        if self._is_closed:
            return
        if end.failure is None and (works := self._conversions.landed(end.operation)):
            self._unpack(end.operation, works)
        whole = self._conversions.ended(end)
        self._stage()
        if whole is not None:
            self._on_end(whole)

    def _unpack(self, operation: OperationId, works: Sequence[Unpack]) -> None:
        """Unpack a portion, unless its bytes are not those that were sent."""
        converter = self._converter
        if converter is None:
            return
        for work in works:
            if not _is_intact(work, converter):
                log.error("event=checksum_failure portion=%d", operation)
                self._conversions.damage(operation)
                return
        for work in works:
            converter.unpack(work)


def _is_intact(work: Unpack, converter: Converter) -> bool:
    """Whether each staged block is what its source has told of it."""
    if not any(work.digests):
        return True
    return all(
        expected is None or found == expected
        for found, expected in zip(converter.digests(work), work.digests, strict=True)
    )
