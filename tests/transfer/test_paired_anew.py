"""A source that is paired anew before the reads of the lost pair have ended is held to its word.

Between a lost channel and the proof that its reads are over, a new channel to the same life of the
source may be there. What is read over that one was not torn down, whatever was before it: a read
there that never ends must end by its timeout, or its request waits for ever.
"""

import pytest

from core.ids import OperationId
from tests.transfer.one_receive import R, start
from tests.transfer.two_sides import DecodeSide, PrefillSide, owner
from transfer.actions import TearDown

S = owner("s")


def pair_anew(decode: DecodeSide, prefill: PrefillSide) -> None:
    """R's read is torn down, but has not ended; S is read over a new channel."""
    start(decode, prefill)
    actions = decode.reader.source_lost(prefill.incarnation, "connection closed", decode.now)
    assert isinstance(actions[0], TearDown)
    decode.carry_out(actions[1:])  # a rank is slow to tear it down
    decode.request(S, prefill)
    decode.ticket(prefill.compute(S, decode.now, num_blocks=3))


def end_old(decode: DecodeSide) -> None:
    decode.carry_out(decode.reader.read_failed(OperationId(1), "torn down", decode.now))


@pytest.mark.parametrize("is_old_over", [True, False])
def test_c20_a_read_over_the_new_pair_has_its_timeout(
    decode: DecodeSide, prefill: PrefillSide, *, is_old_over: bool
) -> None:
    # Given a new pair, and what was read over the one before: it ends, or has not yet
    pair_anew(decode, prefill)
    if is_old_over:
        end_old(decode)
    assert R in decode.failed
    # When the source does not answer
    decode.nic.freeze(prefill.incarnation)
    for _ in range(20):  # renewals come between
        deadline = decode.reader.next_deadline()
        if deadline is None:
            break
        decode.now = deadline
        decode.tick()
        decode.exchange()
    # Then it is torn down, once
    assert S in decode.failed
    assert decode.torn == [prefill.incarnation]
    if not is_old_over:
        end_old(decode)
    assert decode.num_free == 10


def test_the_end_of_old_reads_does_not_tear_the_new_pair_down(
    decode: DecodeSide, prefill: PrefillSide
) -> None:
    pair_anew(decode, prefill)
    end_old(decode)
    assert not decode.torn
    decode.land_all()
    assert S in decode.delivered
    decode.forget(S)


def test_a_read_that_fails_over_the_new_pair_tears_it_down(
    decode: DecodeSide, prefill: PrefillSide
) -> None:
    """The worker pairs with the source anew: nothing is read over a pair that the NIC has lost."""
    pair_anew(decode, prefill)
    failed = decode.reader.read_failed(OperationId(2), "connection reset", decode.now)
    assert [type(action) for action in failed if isinstance(action, TearDown)] == [TearDown]
    decode.carry_out(action for action in failed if not isinstance(action, TearDown))
    end_old(decode)
    assert S in decode.failed
