"""A source that says, unasked, that it holds a request no more is believed: once void, always void.

What it still has in its blocks is another request's by then. Only what it says of a good lease has
to answer a question, since that question's time is what proves anything.
"""

import msgspec

from core.ids import Incarnation
from tests.transfer.one_receive import R, start
from tests.transfer.two_sides import DecodeSide, PrefillSide


def test_an_unasked_void_ends_the_request(decode: DecodeSide, prefill: PrefillSide) -> None:
    start(decode, prefill)
    void = prefill.book.void(R)
    decode.carry_out(decode.reader.renewed(void, prefill.incarnation, decode.now))
    assert "void" in decode.failed[R].reason
    decode.land_all()
    assert decode.num_free == 10


def test_an_unasked_void_of_another_life_is_stale(decode: DecodeSide, prefill: PrefillSide) -> None:
    start(decode, prefill)
    void = msgspec.structs.replace(prefill.book.void(R), incarnation=Incarnation("before"))
    decode.carry_out(decode.reader.renewed(void, prefill.incarnation, decode.now))
    decode.land_all()
    assert R in decode.delivered
    assert decode.reader.stats.stale["renewed"] == 1
    decode.forget(R)


def test_an_unasked_good_lease_proves_nothing(decode: DecodeSide, prefill: PrefillSide) -> None:
    start(decode, prefill)
    decode.now += 31  # beyond what the ticket proves
    good = msgspec.structs.replace(prefill.book.void(R), requests=(R,), void=())
    decode.carry_out(decode.reader.renewed(good, prefill.incarnation, decode.now))
    decode.land_all()
    assert R not in decode.delivered
    decode.cancel(R)
