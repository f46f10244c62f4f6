"""Reads of all ranks as one: each rank reads its own part, and a read is what all of them read."""

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Protocol

from core.errors import InternalError
from core.ids import Incarnation, OperationId
from core.messages import Welcome
from engine.rank_group import LEADER
from ranks.messages import Cancel, Command, Connect, Post, TearDown, WarmUp
from transfer.actions import PostRead
from transfer.reads import ReadEnd, Reads

log = logging.getLogger(__name__)

ANSWER_TIMEOUT_S = 10.0
"""A rank that does not prove the end of a torn-down source's reads by then is taken for frozen."""


class OtherRanks(Protocol):
    """The followers, as far as reads need them."""

    @property
    def ranks(self) -> Iterable[int]:
        """Their numbers."""
        ...

    def send(self, command: Command) -> None:
        """Have each carry ``command`` out; their answers come to ``GroupReads.ended``."""
        ...

    def kill(self) -> None:
        """End them: on return nothing is written to their pools."""
        ...


@dataclass(slots=True)
class _Outstanding:
    waiting_for: set[int]
    """Ranks whose part is not terminal. A set: one that reports twice does not replace another."""
    end: ReadEnd
    """Of the parts that are terminal, joined."""
    is_torn: bool = False
    """Its source was torn down since: what fails of it says nothing about a pair of later."""


class GroupReads:
    """See ``Reads``: all or nothing across ranks.

    A read has landed when every rank's part has, and has failed when one has; either is told once,
    when *every* rank's part is terminal. One failed part tears its source down on all ranks, so
    that the others' parts end soon.
    """

    def __init__(
        self,
        open_own: Callable[[Callable[[ReadEnd], None]], Reads],
        others: OtherRanks,
        on_end: Callable[[ReadEnd], None],
    ) -> None:
        """Begin without sources.

        Args:
            open_own: Makes the leader's own reads, given who is told of their ends.
            others: Those of the followers.
            on_end: Is told of each read's end, from the loop.
        """
        self._others = others
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._outstanding: dict[OperationId, _Outstanding] = {}
        self._drained = asyncio.Event()
        self._is_ending = False
        self._is_closed = False
        self._own = open_own(lambda end: self.ended(LEADER, end))

    @property
    def transport(self) -> str:
        """See ``Reads.transport``: the same on all ranks."""
        return self._own.transport

    @property
    def sources_must_progress(self) -> bool:
        """See ``Reads.sources_must_progress``: the same on all ranks."""
        return self._own.sources_must_progress

    def connect(self, source: Incarnation, welcome: Welcome) -> None:
        """See ``Reads.connect``. A follower that fails to connect fails each read from there."""
        self._own.connect(source, welcome)
        self._others.send(Connect(source, welcome))

    def post(self, read: PostRead) -> None:
        """See ``Reads.post``."""
        if self._is_ending:
            self._refuse(read.operation, read.peer)
            return
        self._begin(read.operation, read.peer)
        self._others.send(Post(read))
        self._own.post(read)

    def warm_up(self, operation: OperationId, source: Incarnation) -> None:
        """See ``Reads.warm_up``: of every rank's pair."""
        if self._is_ending:
            self._refuse(operation, source)
            return
        self._begin(operation, source)
        self._others.send(WarmUp(operation, source))
        self._own.warm_up(operation, source)

    def cancel(self, operation: OperationId) -> None:
        """See ``Reads.cancel``. Each rank has posted another share of its part."""
        if operation in self._outstanding:
            self._others.send(Cancel(operation))
            self._own.cancel(operation)

    def tear_down(self, source: Incarnation, reason: str) -> None:
        """See ``Reads.tear_down``."""
        self._others.send(TearDown(source, reason))
        self._own.tear_down(source, reason)
        begun = {
            operation: read
            for operation, read in self._outstanding.items()
            if read.end.peer == source
        }
        for read in begun.values():
            read.is_torn = True
        if begun:
            self._loop.call_later(ANSWER_TIMEOUT_S, self._require_ended, begun)

    async def drain(self, *, timeout_s: float) -> bool:
        """See ``Reads.drain``."""
        self._is_ending = True
        self._drained.clear()
        if self._outstanding:
            try:
                async with asyncio.timeout(timeout_s):
                    await self._drained.wait()
            except TimeoutError:
                return False
        return True

    def close(self) -> None:
        """See ``Reads.close``. The followers end with it: only that proves the end of theirs."""
        self._is_closed = True
        self._own.close()
        self._others.kill()

    def ended(self, rank: int, end: ReadEnd) -> None:
        """The part of ``rank`` is terminal. What is not awaited is counted as nothing."""
        read = self._outstanding.get(end.operation)
        if self._is_closed or read is None or rank not in read.waiting_for:
            log.warning("dropped=ReadEnd operation=%d rank=%d", end.operation, rank)
            return
        read.waiting_for.remove(rank)
        is_first_failure = end.failure is not None and read.end.failure is None
        read.end = _joined(read.end, rank, end)
        if not read.waiting_for:
            del self._outstanding[end.operation]
            if not self._outstanding:
                self._drained.set()
            self._on_end(read.end)
        elif is_first_failure and not read.is_torn:
            self.tear_down(end.peer, f"rank {rank} failed: {end.failure}")

    def _refuse(self, operation: OperationId, source: Incarnation) -> None:
        end = ReadEnd(operation, source, "this worker is ending")
        self._loop.call_soon(self._tell, end)

    def _tell(self, end: ReadEnd) -> None:
        if not self._is_closed:
            self._on_end(end)

    def _begin(self, operation: OperationId, source: Incarnation) -> None:
        ranks = {LEADER, *self._others.ranks}
        self._outstanding[operation] = _Outstanding(ranks, ReadEnd(operation, source))

    def _require_ended(self, begun: dict[OperationId, _Outstanding]) -> None:
        """Raise if a torn-down read is outstanding still: its end cannot be proven any more."""
        late = {
            rank
            for operation, read in begun.items()
            if self._outstanding.get(operation) is read
            for rank in read.waiting_for
        }
        if late and not self._is_closed:
            raise InternalError(
                f"ranks {sorted(late)} of this worker did not end torn-down reads within "
                f"{ANSWER_TIMEOUT_S} s"
            )


def _joined(joined: ReadEnd, rank: int, part: ReadEnd) -> ReadEnd:
    """Return the end of the parts so far and of the one of ``rank``; the first failure stays."""
    part_failure = None if part.failure is None else f"rank {rank}: {part.failure}"
    failure = joined.failure or part_failure
    return replace(
        joined,
        failure=failure,
        is_damaged=joined.is_damaged or part.is_damaged,
        is_cancelled=failure is None and (joined.is_cancelled or part.is_cancelled),
        nbytes=joined.nbytes + part.nbytes,
        num_descriptors=joined.num_descriptors + part.num_descriptors,
        duration_s=max(joined.duration_s, part.duration_s),
        path=part.path if rank == LEADER else joined.path,
    )
