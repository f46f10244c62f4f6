"""A ticket that names the wrong positions ends its request, never the worker that got it.

Positions that overlap would be allocated twice, a far one would grow a table by gigabytes, and one
that is left out would be read as KV that nobody wrote.
"""

import dataclasses

import msgspec
import pytest

from core.ids import Attempt, BlockId, Generation, Incarnation, Owner, RequestId
from core.kv_layout import KVGroup
from core.messages import FirstToken, GroupBlocks, PieceId, Ticket
from transfer.positions import BlockSizes
from transfer.receiving import Receiving, TransferShape, covers
from transfer.ticket_faults import fault_of, gap_in

SHAPE = TransferShape(
    num_layers=1,
    sizes=BlockSizes(16, 16, (KVGroup(layers=(0,)), KVGroup(layers=(1,), window=32))),
    layer_nbytes=1,
)
OWNER: Owner = (RequestId("r"), Attempt(1))


def receiving(
    first_token: int = 32, num_tokens: int = 100, *, shape: TransferShape = SHAPE
) -> Receiving:
    wanted = range(first_token, num_tokens)
    return Receiving(OWNER, Incarnation("P"), shape, 0.0, wanted=wanted)


def ticket(*runs: tuple[int, int, int], chunk: int = 0, last: bool = True) -> Ticket:
    return Ticket(
        request_id=OWNER[0],
        attempt=OWNER[1],
        incarnation=Incarnation("P"),
        piece=PieceId(0, 0, chunk),
        blocks=tuple(
            GroupBlocks(
                group,
                first,
                tuple(BlockId(n) for n in range(count)),
                tuple(Generation(1) for _ in range(count)),
            )
            for group, first, count in runs
        ),
        num_tokens=100,
        lease_s=30.0,
        last=last,
        first_token=FirstToken(7) if last else None,
    )


@pytest.mark.parametrize(
    ("runs", "complaint"),
    [
        ([(0, 2, 0)], "malformed"),
        ([(0, 2, 3), (0, 4, 2)], "twice"),
        ([(0, 1, 3)], "outside"),
        ([(0, 2, 6)], "outside"),
        ([(0, 10**9, 1)], "outside"),
        ([(2, 2, 1)], "malformed"),
    ],
)
def test_ticket_with_wrong_positions_is_refused(
    runs: list[tuple[int, int, int]], complaint: str
) -> None:
    fault = fault_of(ticket(*runs), receiving())
    assert fault is not None
    assert complaint in fault


def test_position_of_an_earlier_ticket_is_refused() -> None:
    entry = receiving()
    entry.add(ticket((0, 2, 2), last=False), 0.0)
    fault = fault_of(ticket((0, 3, 4), chunk=1), entry)
    assert fault is not None
    assert "twice" in fault


def test_tickets_that_leave_a_block_out_are_noticed_before_delivery() -> None:
    entry = receiving()
    entry.add(ticket((0, 2, 2), last=False), 0.0)
    assert gap_in(entry) is None  # not all are here
    entry.add(ticket((0, 5, 2), (1, 4, 3), chunk=1), 0.0)
    entry.is_announced = True
    assert gap_in(entry) == "no ticket names blocks [4] of group 0"


def test_d16_blocks_behind_the_window_may_be_left_out() -> None:
    entry = receiving()
    # Decode reads from 100 - 32 + 1 = 69 on: block 4.
    entry.add(ticket((0, 2, 5), (1, 4, 3)), 0.0)
    entry.is_announced = True
    assert gap_in(entry) is None


def test_g16_sinks_must_be_named_with_the_window() -> None:
    sinking = msgspec.structs.replace(SHAPE.groups[1], num_sinks=20)
    shape = dataclasses.replace(SHAPE, sizes=BlockSizes(16, 16, (SHAPE.groups[0], sinking)))
    entry = receiving(first_token=0, shape=shape)
    entry.add(ticket((0, 0, 7), (1, 4, 3)), 0.0)
    entry.is_announced = True
    assert gap_in(entry) == "no ticket names blocks [0, 1] of group 1"

    # Where decode has them in its own cache, it does not ask for them
    entry = receiving(first_token=32, shape=shape)
    entry.add(ticket((0, 2, 5), (1, 4, 3)), 0.0)
    entry.is_announced = True
    assert gap_in(entry) is None


@pytest.mark.parametrize(
    ("num_tokens", "kind", "complaint"),
    [
        (99, "last", "99 tokens of 100"),
        (101, "chunk", "101 tokens of 100"),
        (80, "chunk", "its blocks go to 96"),
        (95, "chunk", "its blocks go to 96"),
        (96, "chunk", None),
        (100, "last", None),
    ],
)
def test_a_ticket_covers_what_its_blocks_hold(
    num_tokens: int, kind: str, complaint: str | None
) -> None:
    """Fewer would be left unwritten where blocks are converted, more would be another's."""
    runs = (0, 2, 5 if kind == "last" else 4)
    message = msgspec.structs.replace(ticket(runs, last=kind == "last"), num_tokens=num_tokens)
    fault = fault_of(message, receiving())
    assert (fault is None) == (complaint is None)
    assert complaint is None or (fault is not None and complaint in fault)


def test_smaller_blocks_there_are_counted_in_their_own_size() -> None:
    shape = dataclasses.replace(SHAPE, sizes=BlockSizes(8, 16, SHAPE.groups))
    entry = receiving(shape=shape)
    assert fault_of(ticket((0, 4, 9)), entry) is None
    piece = entry.add(ticket((0, 4, 9)), 0.0)
    assert [str(run) for run in piece.positions] == ["group 0 [2, 7)"]
    assert (piece.num_source_blocks, piece.num_blocks) == (9, 5)
    fault = fault_of(ticket((0, 13, 1), chunk=1), receiving(shape=shape))
    assert fault is not None
    assert "outside" in fault


def test_a_ticket_of_tokens_that_no_window_here_needs_has_landed_at_once() -> None:
    """With larger blocks there, a sink's block is named for tokens that decode has already."""
    sinking = KVGroup(layers=(0,), window=8, num_sinks=4)
    shape = dataclasses.replace(SHAPE, sizes=BlockSizes(32, 16, (sinking,)))
    entry = receiving(first_token=16, shape=shape)
    piece = entry.add(ticket((0, 0, 1), last=False), 0.0)
    assert piece.positions == ()
    assert list(entry.landed()) == [piece]


def test_c24_chunk_number_is_bounded_by_the_blocks_that_were_asked_for() -> None:
    """Otherwise one number of a peer would have its reader keep, and count through, a million."""
    entry = receiving()
    most = SHAPE.max_chunks(range(32, 100))
    assert most == 2 * 5 + 1
    for chunk, complaint in ((most - 1, None), (most, "does not exist"), (2**20 - 1, "not exist")):
        fault = fault_of(ticket((0, 2, 1), chunk=chunk, last=False), entry)
        assert (fault is None) == (complaint is None)
        assert complaint is None or complaint in str(fault)


def test_c24_a_last_chunk_that_is_far_away_is_incomplete_at_once() -> None:
    assert not covers([PieceId(0, 0, 2**40)], 2**40, SHAPE)
