"""I10: each fault at each point of a transfer ends cleanly.

Whatever happens, and whenever: no byte is trusted that is not the request's own, each read's end is
told to the block manager once, no block is free while a write for it may land, and at the end every
block of both sides is free.
"""

from collections.abc import Callable

import pytest

from blockmgr.states import BlockState
from core.ids import BlockId, Owner
from core.messages import PieceId, PrefillFailed
from tests.transfer.two_sides import DecodeSide, PrefillSide, owner

R = owner("r")
Step = Callable[[DecodeSide, PrefillSide], None]


def offer(decode: DecodeSide, prefill: PrefillSide) -> None:
    decode.request(R, prefill)
    for chunk in (0, 1):
        ticket = prefill.compute(
            R,
            decode.now,
            first_index=2 * chunk,
            num_blocks=2,
            piece=PieceId(0, 1, chunk),
            last=chunk == 1,
        )
        decode.ticket(ticket)


def before_post(decode: DecodeSide, prefill: PrefillSide) -> None:
    decode.auto_allocate = False
    offer(decode, prefill)


def posted(decode: DecodeSide, prefill: PrefillSide) -> None:
    offer(decode, prefill)


def partly_landed(decode: DecodeSide, prefill: PrefillSide) -> None:
    offer(decode, prefill)
    decode.nic.step(len([write for write in decode.nic.writes if write.read == 1]))
    decode.poll()


def landed_not_notified(decode: DecodeSide, prefill: PrefillSide) -> None:
    offer(decode, prefill)
    decode.nic.finish()


def notified_not_promoted(decode: DecodeSide, prefill: PrefillSide) -> None:
    offer(decode, prefill)
    decode.now += 31
    decode.land_all()
    assert R not in decode.delivered


def running(decode: DecodeSide, prefill: PrefillSide) -> None:
    offer(decode, prefill)
    decode.land_all()
    assert R in decode.delivered


def abort(decode: DecodeSide, _: PrefillSide) -> None:
    decode.cancel(R)


def finish(decode: DecodeSide, prefill: PrefillSide) -> None:
    """The source says that it gave up; the reader may have everything already."""
    prefill.book.revoke(R)
    message = PrefillFailed(*R, prefill.incarnation, "gave up")
    decode.carry_out(decode.reader.prefill_failed(message, decode.now))


def preempt(decode: DecodeSide, _: PrefillSide) -> None:
    if decode.reader.is_receiving(R):
        decode.roll_back(R)
        decode.auto_allocate = True
        decode.retry()


def peer_death(decode: DecodeSide, prefill: PrefillSide) -> None:
    decode.nic.kill(prefill.incarnation)
    decode.carry_out(decode.reader.source_lost(prefill.incarnation, "killed", decode.now))
    decode.poll()


def timeout(decode: DecodeSide, prefill: PrefillSide) -> None:
    decode.nic.freeze(prefill.incarnation)
    decode.outbox.clear()
    for _ in range(50):
        deadline = decode.reader.next_deadline()
        if deadline is None:
            break
        decode.now = deadline
        decode.tick()
        decode.outbox.clear()


def duplicate(decode: DecodeSide, _: PrefillSide) -> None:
    decode.nic.duplicates_outcomes = True
    for operation in list(decode.operation_of_read.values()):
        if operation in decode.ended:
            decode.carry_out(decode.reader.landed(operation, decode.now))


def reorder(decode: DecodeSide, _: PrefillSide) -> None:
    decode.nic.writes.reverse()


WHEN = [before_post, posted, partly_landed, landed_not_notified, notified_not_promoted, running]
WHAT = [abort, finish, preempt, peer_death, timeout, duplicate, reorder]


@pytest.mark.parametrize("when", WHEN, ids=lambda step: step.__name__)
@pytest.mark.parametrize("what", WHAT, ids=lambda step: step.__name__)
def test_i10_fault_matrix(decode: DecodeSide, prefill: PrefillSide, what: Step, when: Step) -> None:
    when(decode, prefill)
    what(decode, prefill)
    check(decode, R)

    decode.auto_allocate = True
    decode.retry()
    decode.nic.thaw(prefill.incarnation)
    decode.land_all()
    decode.exchange()
    check(decode, R)
    if what in {duplicate, reorder, preempt}:
        assert R in decode.delivered
    else:
        assert (R in decode.delivered) <= (when is running or what is timeout)
    assert not decode.reader.is_receiving(R)

    decode.forget(R)
    prefill.expire(decode.now + 1000)
    assert decode.num_free == 10
    assert len(prefill.free) == 64
    assert decode.reader.num_operations == 0
    assert decode.reader.next_deadline() is None


def check(decode: DecodeSide, who: Owner) -> None:
    decode.check()
    assert len(set(decode.ended)) == len(decode.ended)
    if who in decode.delivered:
        assert who not in decode.failed
        assert not decode.blocks.holds(who) or decode.wrong_positions(who) == []
    for write in decode.nic.writes:
        block = (write.to_address - decode.pool.address) // decode.layout.block_nbytes
        assert decode.blocks.state(BlockId(block)) is not BlockState.FREE
