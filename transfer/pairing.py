"""What one rank of a decode worker reads from each rank of a prefill worker. Arithmetic only.

    prefill, 2 ranks       rank 0: heads [0 1]      rank 1: heads [2 3]
                                    │ │                      │ │
    decode, 8 ranks                 0 0 1 1                  2 2 3 3    heads, a rank each

Where decode has more ranks than there are heads, several read the same one; where prefill has, one
of the ranks with a copy is read.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from core.errors import HandshakeError
from core.ids import Incarnation
from core.kv_heads import heads_of_rank
from core.kv_layout import KVLayout
from core.messages import Compatibility
from transfer.handshake import check_compatible


@dataclass(frozen=True, slots=True)
class HeadShare:
    """Adjacent KV heads that come from one rank of the source."""

    source_rank: int
    source_heads: range
    """Counted from the first in a block of that rank."""
    heads: range
    """The same heads, counted from the first in a block of the reading rank."""


@dataclass(frozen=True, slots=True)
class PairPlan:
    """How KV of one source becomes KV of one local rank."""

    source: KVLayout
    """Of each rank there."""
    target: KVLayout
    num_source_ranks: int
    shares: tuple[HeadShare, ...]
    """By source rank; together every head of the target once."""

    @classmethod
    def of(cls, mine: Compatibility, theirs: Compatibility | None, rank: int) -> "PairPlan":
        """Return the plan of local rank ``rank`` for a source that has sent ``theirs``.

        Raises:
            HandshakeError: their KV cannot become ours; names each field, both values and the fix.
        """
        if theirs is None:
            raise HandshakeError(
                "the prefill worker does not say what its blocks look like; run one Sluice "
                "version on both"
            )
        check_compatible(reader=mine, source=theirs)
        shares = tuple(_shares(mine, theirs, rank))
        return cls(theirs.kv_layout, mine.kv_layout, theirs.tensor_parallel_size, shares)

    @property
    def is_direct(self) -> bool:
        """Whether the bytes of a block there are the bytes of a block here."""
        return self.source == self.target and len(self.shares) == 1

    @property
    def wire_layer_nbytes(self) -> int:
        """Bytes that are read of each layer of each block that a ticket names."""
        return len(self.shares) * self.source.layer_nbytes


def rank_of_source(source: Incarnation, rank: int) -> Incarnation:
    """Return the name of one rank of a source: each has a transport of its own."""
    return source if rank == 0 else Incarnation(f"{source}.{rank}")


def _shares(mine: Compatibility, theirs: Compatibility, rank: int) -> Iterator[HeadShare]:
    """Yield the heads of ``rank`` by the source rank that they are read from, ascending."""
    if mine.kv_layout.heads_per_group != mine.kv_layout.num_kv_heads:
        # Groups by head: both sides have as many ranks, so each block has its like.
        every = range(mine.kv_layout.heads_per_group)
        yield HeadShare(rank, every, every)
        return
    here = heads_of_rank(mine.total_kv_heads, rank=rank, num_ranks=mine.tensor_parallel_size)
    head = here.start
    while head in here:
        source_rank = _holder(mine, theirs, rank, head)
        there = heads_of_rank(
            theirs.total_kv_heads, rank=source_rank, num_ranks=theirs.tensor_parallel_size
        )
        end = min(here.stop, there.stop)
        yield HeadShare(
            source_rank=source_rank,
            source_heads=range(head - there.start, end - there.start),
            heads=range(head - here.start, end - here.start),
        )
        head = end


def _holder(mine: Compatibility, theirs: Compatibility, rank: int, head: int) -> int:
    """Return the source rank that local rank ``rank`` reads ``head`` from.

    Where several hold copies, the local ranks that need it are spread evenly over them.
    """
    holders = _ranks_with(head, theirs)
    readers = _ranks_with(head, mine)
    return holders[(rank - readers.start) * len(holders) // len(readers)]


def _ranks_with(head: int, side: Compatibility) -> range:
    """Return the ranks of one side that hold ``head``."""
    num_heads, num_ranks = side.total_kv_heads, side.tensor_parallel_size
    if num_ranks <= num_heads:
        rank = head // (num_heads // num_ranks)
        return range(rank, rank + 1)
    num_copies = num_ranks // num_heads
    return range(head * num_copies, (head + 1) * num_copies)
