"""Reads whose bytes do not fit as they are: staged in portions, then unpacked into their blocks.

                      room in the staging          every byte landed
    waits  ────────▶  portions in flight  ────────▶  unpacked  ──── last portion ────▶ ended
                        │ failed, cancelled                               ▲
                        ╰──────── nothing is unpacked any more ───────────╯
                                  once all in flight have ended

Pure: the shell posts portions, says how each ended, and unpacks what it is told to.
"""

import itertools
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from core.errors import InternalError
from core.ids import Incarnation, OperationId
from core.kv_unpack import Unpack
from transfer.actions import PostRead
from transfer.extents import LayerSpan
from transfer.pairing import HeadShare, PairPlan, rank_of_source
from transfer.quanta import EndedRead, ReadPart
from transfer.slot_runs import SourceBlock, source_blocks
from transfer.split import merged
from transfer.staging import ALIGNMENT, Staging, padded
from transfer.transport import ExtentRows

DAMAGED: Final = "a read has brought other bytes than were sent"
PORTION_NBYTES: Final = 2**21
"""Unpacked at once, on the event loop; a block that is larger is a portion of its own."""
ROUNDED_PORTION_NBYTES: Final = 2**19
"""The same where numbers are rounded, which takes several times as long as copying them."""
_LEAST_NUM_PORTIONS: Final = 8
"""That a small staging has room for, where blocks are small: one lands while others are posted."""
_NUM_PEERS_AT_LIMIT: Final = 2
"""That fill the staging together: one that does not answer leaves room for others."""
_KEPT_SHARE: Final = 0.5
"""Of the staging, that may be kept for single sources."""


@dataclass(frozen=True, slots=True)
class Portion:
    """Some blocks of one read, on their way through the staging."""

    operation: OperationId
    """Of its own: negative, so that it is nobody else's."""
    read: PostRead
    parts: tuple[ReadPart, ...]
    unpacks: tuple[Unpack, ...]
    """A share each; to be done once all has landed."""
    offset: int
    nbytes: int
    """Of the staging."""


@dataclass(slots=True, eq=False)
class _Read:
    read: PostRead
    plan: PairPlan
    queued_at: float
    span: LayerSpan
    """What is read of each of the source's blocks."""
    todo: deque[SourceBlock]
    in_flight: set[OperationId] = field(default_factory=set[OperationId])
    nbytes: int = 0
    num_descriptors: int = 0
    failure: str | None = None
    is_cancelled: bool = False
    is_damaged: bool = False

    @property
    def is_wanted(self) -> bool:
        """Whether what lands is still to be unpacked."""
        return self.failure is None and not self.is_cancelled

    def portion_nbytes(self, num_blocks: int) -> int:
        """Return the room that so many of its blocks take."""
        return _portion_nbytes(self.plan, num_blocks * self.span.nbytes)

    def end(self) -> EndedRead:
        return EndedRead(
            operation=self.read.operation,
            peer=rank_of_source(self.read.peer, self.plan.shares[0].source_rank),
            queued_at=self.queued_at,
            nbytes=self.nbytes,
            num_descriptors=self.num_descriptors,
            failure=self.failure,
            is_cancelled=self.is_cancelled and self.failure is None,
            is_damaged=self.is_damaged,
        )


class Conversions:
    """Reads take turns for the staging; who has no room waits, and nobody takes it before.

    A portion's room is its own until its reads are terminal, as a block is. Room for one block is
    kept for each source that is connected, as far as half of the staging goes: sources that do not
    answer do not stop one that does, however many they are.

    Invariants (``check_invariants``):
        * a read is known until it is terminal, and ends exactly once;
        * the room that is taken is that of the portions in flight, and what is kept.
    """

    def __init__(self, room: range) -> None:
        """Stage in ``room``: offsets in the registered memory."""
        self._staging = Staging(room)
        self._reads: dict[OperationId, _Read] = {}
        self._turns: deque[OperationId] = deque()
        self._portions: dict[OperationId, Portion] = {}
        self._of_peer: Counter[Incarnation] = Counter()
        self._connected: dict[Incarnation, int] = {}
        """What a portion of one block of a source takes."""
        self._kept: dict[Incarnation, int] = {}
        """Offset of the room that is kept for a source."""
        self._in_kept: dict[Incarnation, OperationId] = {}
        """The portion that is in it."""
        self._numbers = map(OperationId, itertools.count(-1, -1))

    def __len__(self) -> int:
        """Reads that are not terminal."""
        return len(self._reads)

    @property
    def staging_nbytes(self) -> int:
        """Room in all."""
        return self._staging.nbytes

    def connect(self, source: Incarnation, plan: PairPlan) -> None:
        """Keep room for a block of ``source``, until it is dropped."""
        self._connected[source] = least_staging_nbytes(plan)
        self._keep_room()

    def is_portion(self, operation: OperationId) -> bool:
        """Whether it is a portion in flight."""
        return operation in self._portions

    def read_of(self, operation: OperationId) -> OperationId:
        """Return the read that a portion in flight is of; anything else is returned as it is."""
        portion = self._portions.get(operation)
        return operation if portion is None else portion.read.operation

    def add(self, read: PostRead, plan: PairPlan, now: float) -> None:
        """Convert ``read`` in time.

        Raises:
            InternalError: it is known already, or its blocks do not fit each other.
        """
        blocks = source_blocks(
            read, source_size=plan.source.block_size, target_size=plan.target.block_size
        )
        if read.operation in self._reads or not blocks:
            raise InternalError(f"operation {read.operation} is known already, or reads nothing")
        span = LayerSpan.of_piece(read.piece, plan.source)
        self._reads[read.operation] = _Read(read, plan, now, span, deque(blocks))
        self._turns.append(read.operation)

    def next(self) -> Portion | None:
        """Return what to read now, in flight from here on; None: wait for an end, or an ``add``."""
        is_full = False
        for operation in self._turns:
            entry = self._reads[operation]
            blocks = self._chosen(entry)
            if not is_full and self._has_share(entry, blocks):
                offset = self._staging.take(entry.portion_nbytes(len(blocks)))
                if offset is not None:
                    return self._begin(entry, blocks, offset)
                is_full = True  # behind it, only what is kept may be used
            source = entry.read.peer
            if source in self._kept and source not in self._in_kept:
                portion = self._begin(entry, blocks[:1], self._kept[source])
                self._in_kept[source] = portion.operation
                return portion
        return None

    def landed(self, operation: OperationId) -> tuple[Unpack, ...]:
        """Return what is to be unpacked of a portion whose bytes are all here, before ``ended``."""
        portion = self._portions[operation]
        is_wanted = self._reads[portion.read.operation].is_wanted
        return portion.unpacks if is_wanted else ()

    def damage(self, operation: OperationId) -> None:
        """A portion's bytes are all here, and are not those of the source: its read fails."""
        entry = self._reads[self._portions[operation].read.operation]
        entry.is_damaged = True
        entry.failure = entry.failure or DAMAGED

    def ended(self, ended: EndedRead) -> EndedRead | None:
        """A portion is terminal, and unpacked if it was to be. Return its read's end, if it is one.

        Raises:
            InternalError: it has ended before.
        """
        portion = self._portions.pop(ended.operation, None)
        if portion is None:
            raise InternalError(f"portion {ended.operation} ended twice")
        self._give_back(portion)
        self._of_peer -= Counter({portion.read.peer: portion.nbytes})
        entry = self._reads[portion.read.operation]
        entry.in_flight.discard(ended.operation)
        entry.nbytes += ended.nbytes
        entry.num_descriptors += ended.num_descriptors
        entry.is_cancelled = entry.is_cancelled or ended.is_cancelled
        entry.failure = entry.failure or ended.failure
        if not entry.is_wanted:
            self._post_no_more(entry)
        return self._end_if_over(entry)

    def cancel(self, operation: OperationId) -> tuple[list[OperationId], EndedRead | None]:
        """Nobody wants a read any more: nothing of it is posted or unpacked from here on.

        Returns:
            Its portions in flight, and its end, if there are none.
        """
        entry = self._reads.get(operation)
        if entry is None:
            return [], None
        entry.is_cancelled = True
        self._post_no_more(entry)
        return sorted(entry.in_flight), self._end_if_over(entry)

    def drop(self, source: Incarnation, reason: str) -> list[EndedRead]:
        """Post and unpack nothing more of ``source``; return the ends of reads not in flight."""
        ends: list[EndedRead] = []
        for entry in list(self._reads.values()):
            if entry.read.peer == source:
                entry.failure = entry.failure or reason
                self._post_no_more(entry)
                if (end := self._end_if_over(entry)) is not None:
                    ends.append(end)
        self._connected.pop(source, None)
        kept = self._kept.pop(source, None)
        if kept is not None and self._in_kept.pop(source, None) is None:
            self._staging.give_back(kept)
        return ends

    def check_invariants(self) -> None:
        """Assert the invariants above: O(n), for tests."""
        self._staging.check_invariants()
        assert self._staging.is_unused == (not self._portions and not self._kept)
        assert self._in_kept.keys() <= self._kept.keys() <= self._connected.keys()
        in_flight = {at for entry in self._reads.values() for at in entry.in_flight}
        assert in_flight == set(self._portions)
        waiting = {operation for operation, entry in self._reads.items() if entry.todo}
        assert waiting == set(self._turns)
        assert all(entry.todo or entry.in_flight for entry in self._reads.values())

    # Within

    def _has_share(self, entry: _Read, blocks: list[SourceBlock]) -> bool:
        limit = self._staging.nbytes // _NUM_PEERS_AT_LIMIT
        of_peer = self._of_peer[entry.read.peer]
        return not of_peer or of_peer + entry.portion_nbytes(len(blocks)) <= limit

    def _keep_room(self) -> None:
        """Keep room for each source that has none yet, as far as there is some."""
        limit = int(self._staging.nbytes * _KEPT_SHARE)
        for source, nbytes in self._connected.items():
            total = nbytes + sum(self._connected[each] for each in self._kept)
            if source in self._kept or total > limit:
                continue
            if (offset := self._staging.take(nbytes)) is not None:
                self._kept[source] = offset

    def _give_back(self, portion: Portion) -> None:
        source = portion.read.peer
        if self._in_kept.get(source) == portion.operation:
            del self._in_kept[source]
        else:
            self._staging.give_back(portion.offset)
            self._keep_room()

    def _chosen(self, entry: _Read) -> list[SourceBlock]:
        """Return the blocks of the next portion: one, or as many as are small together."""
        is_copied = entry.plan.source.dtype == entry.plan.target.dtype
        most = PORTION_NBYTES if is_copied else ROUNDED_PORTION_NBYTES
        room = min(most, self._staging.nbytes // _LEAST_NUM_PORTIONS)
        room_of_share = room // len(entry.plan.shares) // ALIGNMENT * ALIGNMENT
        count = max(1, room_of_share // entry.span.nbytes)
        return list(itertools.islice(entry.todo, count))

    def _begin(self, entry: _Read, blocks: list[SourceBlock], offset: int) -> Portion:
        for _ in blocks:
            entry.todo.popleft()
        self._turns.remove(entry.read.operation)
        if entry.todo:
            self._turns.append(entry.read.operation)
        operation = next(self._numbers)
        parts, unpacks = zip(*_shares(entry, blocks, offset), strict=True)
        nbytes = entry.portion_nbytes(len(blocks))
        portion = Portion(operation, entry.read, parts, unpacks, offset, nbytes)
        entry.in_flight.add(operation)
        self._portions[operation] = portion
        self._of_peer[entry.read.peer] += nbytes
        return portion

    def _post_no_more(self, entry: _Read) -> None:
        if entry.todo:
            entry.todo.clear()
            self._turns.remove(entry.read.operation)

    def _end_if_over(self, entry: _Read) -> EndedRead | None:
        if entry.todo or entry.in_flight:
            return None
        del self._reads[entry.read.operation]
        return entry.end()


def least_staging_nbytes(plan: PairPlan) -> int:
    """Return the room without which no read of ``plan`` could ever begin: one block's."""
    return _portion_nbytes(plan, plan.source.block_nbytes)


def _portion_nbytes(plan: PairPlan, nbytes: int) -> int:
    """Return the room for ``nbytes`` of each rank of the source that is read."""
    return len(plan.shares) * padded(nbytes)


def _shares(
    entry: _Read, blocks: list[SourceBlock], offset: int
) -> Iterator[tuple[ReadPart, Unpack]]:
    """Yield what to read of each rank of the source, and how to unpack it."""
    piece, span = entry.read.piece, entry.span
    for number, share in enumerate(entry.plan.shares):
        at = offset + number * padded(len(blocks) * span.nbytes)
        unpack = Unpack(
            source=entry.plan.source,
            offset=at,
            layers=range(piece.first_layer, piece.last_layer + 1),
            source_heads=share.source_heads,
            heads=share.heads,
            runs=tuple(block.runs for block in blocks),
            digests=tuple(block.digest for block in blocks),
        )
        yield _part_of(entry.read.peer, share, blocks, span, at), unpack


def _part_of(
    source: Incarnation, share: HeadShare, blocks: list[SourceBlock], span: LayerSpan, at: int
) -> ReadPart:
    remote = np.array([block.block_id for block in blocks], dtype=np.int64)
    rows: ExtentRows = np.empty((len(blocks), 3), dtype=np.int64)
    rows[:, 0] = at + np.arange(len(blocks)) * span.nbytes
    rows[:, 1] = remote * span.block_nbytes + span.offset
    rows[:, 2] = span.nbytes
    return rank_of_source(source, share.source_rank), merged(rows)
