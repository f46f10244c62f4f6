"""Blocks that come in layer ranges are paid for once, and wait for all of their reads."""

from collections.abc import Iterable

import pytest

from blockmgr.receive_target import ReceiveTarget
from blockmgr.states import BlockState
from core.ids import BlockId, Generation, OperationId, Owner
from decode.scheduler import DecodeScheduler
from tests.decode.bench import Bench

READS = [OperationId(number) for number in (1, 2, 3, 4)]


def receive_ranges(b: Bench, owner: Owner, first: int, count: int) -> None:
    """Receive blocks in as many layer ranges as there are reads, all of them under way."""
    placed = [
        b.scheduler.receive(owner, [ReceiveTarget(0, first, count)], operation)
        for operation in READS
    ]
    assert placed[0] is not None
    assert placed == placed[:1] * len(READS), "one ticket got other blocks than another"


def end_reads(b: Bench) -> None:
    for operation in READS:
        b.blocks.end_operation(operation)


def fill_with_two(b: Bench) -> list[list[list[tuple[BlockId, Generation]]] | None]:
    """Receive four blocks of R in ranges; ask for the rest of R and all of S."""
    owner = b.add("R", 96, remote=True, max_tokens=2).owner
    receive_ranges(b, owner, 0, 4)
    other = b.add("S", 64, remote=True, max_tokens=2, first=1000).owner
    # R has 4 of its 6 blocks and is promised 2; S needs 4, and one stays back
    rest = [
        b.scheduler.receive(other, [ReceiveTarget(0, 0, 4)], OperationId(11)),
        b.scheduler.receive(owner, [ReceiveTarget(0, 4, 2)], OperationId(12)),
    ]
    end_reads(b)
    return rest


def test_the_promise_shrinks_once_however_many_ranges_a_chunk_comes_in() -> None:
    # Given a pool that is full with both: two of R's blocks are still promised
    b = Bench(9)
    assert fill_with_two(b)[0] is None, "S took a block that was promised to R"
    b.scheduler.check_invariants()

    # When the pool is as large as both need, neither is refused
    b = Bench(11)
    assert None not in fill_with_two(b)
    b.scheduler.check_invariants()


class ChargesEachRange(DecodeScheduler):
    """The rule switched off: every ticket's blocks are taken from the promise."""

    def receive(
        self, owner: Owner, targets: Iterable[ReceiveTarget], operation: OperationId
    ) -> list[list[tuple[BlockId, Generation]]] | None:
        targets = list(targets)
        num_joined = sum(each.count for each in targets) - self._blocks.num_vacant(owner, targets)
        placed = super().receive(owner, targets, operation)
        sequence = self._table[owner]
        self._budget.promise(sequence, max((sequence.promised_blocks or 0) - num_joined, 0))
        return placed


def test_fails_where_each_range_is_charged() -> None:
    b = Bench(9)
    b.scheduler.__class__ = ChargesEachRange
    assert fill_with_two(b)[0] is not None, "S passed although R's memory was promised"


@pytest.mark.parametrize("num_ended", range(5))
def test_c01_abort_between_ranges_frees_when_the_last_read_has_ended(num_ended: int) -> None:
    b = Bench(8)
    owner = b.add("R", 64, remote=True, max_tokens=2).owner
    receive_ranges(b, owner, 0, 4)
    for operation in READS[:num_ended]:
        b.blocks.end_operation(operation)

    assert b.scheduler.abort(owner)

    for operation in READS[num_ended:]:
        assert b.blocks.counts()[BlockState.QUARANTINED] == 4
        assert b.num_free == 4
        b.blocks.end_operation(operation)
    assert b.num_free == 8
    b.scheduler.check_invariants()


def test_delivered_blocks_are_decoded_with_whatever_range_came_last() -> None:
    b = Bench(8, prefix_caching=True)
    sequence = b.add("R", 64, remote=True, max_tokens=4)
    receive_ranges(b, sequence.owner, 0, 4)
    for operation in reversed(READS):
        b.blocks.end_operation(operation)
    b.scheduler.deliver(sequence.owner, 7)
    while (batch := b.scheduler.schedule()) is not None:
        b.complete(batch)
    assert b.num_free + b.blocks.counts()[BlockState.CACHED] == 8
    b.scheduler.check_invariants()
