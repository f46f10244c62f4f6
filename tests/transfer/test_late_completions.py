"""I04: who must be told that something is over is told, also when nobody remembers the request.

In a push system the writer's acknowledgement goes to every rank that registered, though the sender
has cleared its room. Here each posted read has its own end, by operation, and each source hears
once that its reader is gone; neither depends on the request still being known.
"""

from blockmgr.states import BlockState
from core.messages import PieceId, PrefillFailed, Released, Withdraw
from tests.transfer.two_sides import DecodeSide, PrefillSide, owner

R = owner("r")


def post_two_reads(decode: DecodeSide, prefill: PrefillSide) -> None:
    decode.request(R, prefill)
    for chunk in (0, 1):
        piece = PieceId(0, 1, chunk)
        decode.ticket(
            prefill.compute(
                R, decode.now, first_index=2 * chunk, num_blocks=2, piece=piece, last=chunk == 1
            )
        )
    assert decode.reader.num_operations == 2


def test_i04_every_read_of_a_forgotten_request_is_told_to_be_over(
    decode: DecodeSide, prefill: PrefillSide
) -> None:
    post_two_reads(decode, prefill)
    decode.cancel(R)
    assert not decode.reader.is_receiving(R)
    assert decode.count(BlockState.QUARANTINED) == 4

    # One by one, in whatever order
    (first, *_), (second, *_) = (
        [write for write in decode.nic.writes if write.read == read]
        for read in decode.operation_of_read
    )
    assert first.read != second.read
    decode.nic.writes = [write for write in decode.nic.writes if write.read != second.read]
    decode.poll()
    assert decode.ended == [decode.operation_of_read[second.read]]
    assert decode.count(BlockState.QUARANTINED) == 2
    decode.nic.writes = []
    decode.poll()
    assert sorted(decode.ended) == sorted(decode.operation_of_read.values())
    assert decode.num_free == 10
    assert decode.reader.num_operations == 0


def test_i04_the_source_of_a_forgotten_request_is_told_once_and_frees(
    decode: DecodeSide, prefill: PrefillSide
) -> None:
    post_two_reads(decode, prefill)
    decode.cancel(R)
    decode.land_all()
    told = [m for m in decode.sent if isinstance(m, Withdraw | Released)]
    assert told == [Withdraw(*R)]
    decode.exchange()
    assert len(prefill.free) == 64


def test_i04_a_source_that_has_forgotten_the_request_takes_the_late_word(
    decode: DecodeSide, prefill: PrefillSide
) -> None:
    # Given a source that gave a request up while its blocks were being read: they stay pinned
    post_two_reads(decode, prefill)
    prefill.book.revoke(R)
    assert len(prefill.free) == 60

    # When its message and the end of the reads cross
    failed = PrefillFailed(*R, prefill.incarnation, "gave up")
    decode.carry_out(decode.reader.prefill_failed(failed, decode.now))
    decode.land_all()
    decode.exchange()

    # Then the reads are over here, and the blocks go there, once, however often that is said
    assert len(decode.ended) == 2
    assert decode.num_free == 10
    assert len(prefill.free) == 64
    prefill.take(Released(*R, prefill.incarnation), decode.now)
    assert len(prefill.free) == 64


def test_i04_two_sources_are_told_apart(decode: DecodeSide, prefill: PrefillSide) -> None:
    other = PrefillSide(prefill.nic.network, prefill.layout, "Q")
    decode.pair(other)
    mine, theirs = owner("mine"), owner("theirs")
    for who, source in ((mine, prefill), (theirs, other)):
        decode.request(who, source)
        decode.ticket(source.compute(who, decode.now, num_blocks=2))
    decode.cancel(mine)
    decode.land_all()
    decode.exchange()
    assert set(decode.delivered) == {theirs}
    assert decode.wrong_positions(theirs) == []
    assert (len(prefill.free), len(other.free)) == (64, 64)
    decode.forget(theirs)
    assert decode.num_free == 10
