"""A request that gives up its read has not ended it: the network may still write.

The failure guarded: its blocks are given to somebody else while that lasts, or what a read of an
earlier life brought is taken for what the present one asked for.
"""

import pytest

from blockmgr.states import BlockState
from core.errors import InternalError
from core.ids import BlockId, OperationId
from core.messages import PieceId, Withdraw
from tests.transfer.conftest import MakeDecode
from tests.transfer.one_receive import R, start
from tests.transfer.two_sides import DecodeSide, PrefillSide, owner
from transfer.actions import Action
from transfer.operations import Operation
from transfer.reader_states import PieceState
from transfer.receiving import Piece, Receiving
from transfer.receptions import Receptions


def test_c01_abort_while_two_pieces_are_read(decode: DecodeSide, prefill: PrefillSide) -> None:
    decode.request(R, prefill)
    for layer in (0, 1):
        piece = PieceId(layer, layer, 0)
        ticket = prefill.compute(R, 0, num_blocks=2, first_index=2 * layer, piece=piece)
        decode.ticket(ticket)
    decode.cancel(R)

    assert not decode.reader.is_receiving(R)
    assert Withdraw(*R) in decode.sent
    assert decode.count(BlockState.QUARANTINED) == 4
    first = [write for write in decode.nic.writes if write.read == 1]
    for write in first:
        decode.nic.writes.remove(write)
        write.land()
    decode.poll()
    assert decode.count(BlockState.QUARANTINED) == 2
    decode.land_all()
    assert decode.num_free == 10
    assert decode.delivered == {}
    assert decode.failed == {}


def test_c02_abort_after_delivery_frees_at_once(decode: DecodeSide, prefill: PrefillSide) -> None:
    start(decode, prefill)
    decode.land_all()
    decode.cancel(R)
    assert decode.num_free == 10


def test_c02_abort_after_landing_before_promotion_frees_at_once(
    decode: DecodeSide, prefill: PrefillSide
) -> None:
    start(decode, prefill)
    decode.now += 31  # the lease is not proven any more: R is CONFIRMING
    decode.land_all()
    assert R not in decode.delivered
    decode.cancel(R)
    assert decode.num_free == 10
    decode.exchange()
    assert R not in decode.delivered


@pytest.mark.parametrize("abort_first", [True, False])
def test_c03_abort_and_completion_in_one_poll(
    decode: DecodeSide, prefill: PrefillSide, *, abort_first: bool
) -> None:
    start(decode, prefill)
    decode.nic.finish()
    steps = [lambda: decode.cancel(R), decode.poll]
    for step in steps if abort_first else reversed(steps):
        step()
    assert decode.num_free == 10
    assert len(decode.ended) == 1


def test_c04_third_late_completion_is_counted_and_dropped(
    decode: DecodeSide, prefill: PrefillSide
) -> None:
    start(decode, prefill)
    decode.cancel(R)
    decode.exchange()
    decode.land_all()
    assert decode.num_free == 10
    (operation,) = decode.ended
    decode.carry_out(decode.reader.landed(operation, decode.now))
    decode.carry_out(decode.reader.read_failed(operation, "late", decode.now))
    assert decode.reader.stats.stale["outcome"] == 2
    assert len(decode.ended) == 1


def test_c21_cancel_is_not_proof(decode: DecodeSide, prefill: PrefillSide) -> None:
    """The library's cancel returns, the write lands later: the next owner's bytes stand."""
    start(decode, prefill, num_blocks=6)
    for read in list(decode.nic.pending):
        decode.nic.cancel(read)
    decode.cancel(R)
    other = owner("other")
    decode.request(other, prefill)
    decode.ticket(prefill.compute(other, 0, num_blocks=4))
    landing = [write for write in decode.nic.writes if write.read == 2]
    for write in landing:
        decode.nic.writes.remove(write)
        write.land()
    decode.poll()
    assert decode.wrong_positions(other) == []
    decode.land_all()  # R's writes, 50 ms late
    assert decode.wrong_positions(other) == []


def test_c21_what_is_not_posted_yet_is_taken_back_and_is_no_failure_of_its_source(
    decode: DecodeSide, prefill: PrefillSide
) -> None:
    start(decode, prefill, num_blocks=4)
    other = owner("other")
    decode.request(other, prefill)
    decode.ticket(prefill.compute(other, decode.now, num_blocks=4))
    first, second = OperationId(1), OperationId(2)
    # When R's client leaves and none of its read was posted yet
    decode.cancel(R)
    assert decode.cancelled == [first]
    assert decode.count(BlockState.QUARANTINED) == 4
    decode.nic.writes = [write for write in decode.nic.writes if write.read != 1]
    del decode.nic.pending[1]
    decode.carry_out(decode.reader.read_cancelled(first))
    # Then its blocks are free at once, and its source goes on serving others
    assert decode.count(BlockState.QUARANTINED) == 0
    assert decode.torn == []
    assert decode.reader.stats.reads_cancelled == 1
    decode.land_all()
    assert other in decode.delivered
    assert decode.reader.read_cancelled(second) == [], "it has ended"


def test_c21_a_rolled_back_read_is_taken_back_too(decode: DecodeSide, prefill: PrefillSide) -> None:
    start(decode, prefill, num_blocks=4)
    decode.roll_back(R)
    assert decode.cancelled == [OperationId(1)]


def test_a_read_that_somebody_waits_for_is_never_taken_back(
    decode: DecodeSide, prefill: PrefillSide
) -> None:
    start(decode, prefill, num_blocks=4)
    with pytest.raises(InternalError, match="waits"):
        decode.reader.read_cancelled(OperationId(1))
    decode.reader._endpoints.begin(  # let the fixture validate
        Operation(
            OperationId(1),
            prefill.incarnation,
            R,
            PieceId(0, 1, 0),
            frozenset({BlockId(4)}),
            4,
        )
    )
    decode.nic.finish()


def test_c21_mutation_trusting_cancel_corrupts_the_next_owner(
    make_decode: MakeDecode, prefill: PrefillSide
) -> None:
    class TrustsCancel(Receptions):
        def abandon(self, piece: Piece) -> list[Action]:
            actions = super().abandon(piece)
            if piece.state is PieceState.READING and piece.operation is not None:
                decode.blocks.end_operation(piece.operation)  # "cancelled, so it is over"
            return actions

    decode = make_decode()
    decode.reader._requests.__class__ = TrustsCancel
    decode.pair(prefill)
    start(decode, prefill, num_blocks=6)
    decode.cancel(R)
    other = owner("other")
    decode.request(other, prefill)
    decode.ticket(prefill.compute(other, 0, num_blocks=6))
    for write in [write for write in decode.nic.writes if write.read == 2]:
        decode.nic.writes.remove(write)
        write.land()
    decode.poll()
    for write in decode.nic.writes:
        write.land()
    assert decode.wrong_positions(other) != []


def test_i01_late_completion_of_a_rolled_back_read_fills_nothing(
    decode: DecodeSide, prefill: PrefillSide
) -> None:
    """The old read of the same piece ends while the new one is still on its way."""
    start(decode, prefill)
    decode.roll_back(R)
    decode.retry()
    assert decode.count(BlockState.QUARANTINED) == 3
    for write in [write for write in decode.nic.writes if write.read == 1]:
        decode.nic.writes.remove(write)
        write.land()
    decode.poll()
    assert R not in decode.delivered
    assert decode.count(BlockState.RECEIVING) == 3
    decode.land_all()
    assert R in decode.delivered
    assert decode.wrong_positions(R) == []


def test_i01_mutation_without_the_operation_check_trusts_unwritten_blocks(
    make_decode: MakeDecode, prefill: PrefillSide
) -> None:
    class NoCheck(Receptions):
        def filled_by(self, pending: Operation) -> tuple[Receiving, Piece] | None:
            entry = self._entries[pending.owner]
            return entry, entry.pieces[pending.piece]

    decode = make_decode()
    decode.reader._requests.__class__ = NoCheck
    decode.pair(prefill)
    start(decode, prefill)
    decode.roll_back(R)
    decode.retry()
    for write in [write for write in decode.nic.writes if write.read == 1]:
        decode.nic.writes.remove(write)
        write.land()
    decode.poll()
    assert R in decode.delivered
    assert decode.wrong_positions(R) != []
    for write in decode.nic.writes:
        write.land()
    decode.reader._requests.__class__ = Receptions
    decode.reader._endpoints.quarantine(decode.operation_of_read[2])  # let the fixture validate
    decode.nic.writes.clear()
    decode.poll()


def test_i06_a_timer_without_proof_frees_nothing(decode: DecodeSide, prefill: PrefillSide) -> None:
    start(decode, prefill)
    decode.nic.freeze(prefill.incarnation)
    decode.cancel(R)
    decode.now += 10_000
    assert decode.count(BlockState.QUARANTINED) == 3
    decode.tick()
    assert decode.torn == [prefill.incarnation]
    assert decode.num_free == 10


def test_h01_another_attempt_is_another_request(decode: DecodeSide, prefill: PrefillSide) -> None:
    """Attempt 1 was given up here; its ticket and its read never satisfy attempt 2."""
    start(decode, prefill)
    decode.cancel(R)
    second = owner("r", attempt=2)
    decode.request(second, prefill)
    late = prefill.compute(R, 0, first_index=5, num_blocks=1, piece=PieceId(0, 1, 1))
    decode.ticket(late)
    assert decode.reader.stats.stale["ticket"] == 1
    decode.land_all()
    assert decode.delivered == {}
    decode.ticket(prefill.compute(second, 0, num_blocks=2))
    decode.land_all()
    assert list(decode.delivered) == [second]
    assert decode.wrong_positions(second) == []
