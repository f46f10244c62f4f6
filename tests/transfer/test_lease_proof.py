"""Bytes are trusted only if they landed while the source provably held its blocks.

The failure guarded: the source's lease ends, its blocks get other KV, and a late read delivers
that KV to the wrong request. The reader has only its own clock, and must never be optimistic.
"""

import pytest

from core.messages import Renew, Renewed
from tests.transfer.two_sides import DecodeSide, PrefillSide, owner
from transfer.receiving import Receiving

R = owner("r")


def renewals(decode: DecodeSide) -> list[Renew]:
    return [message for message in decode.sent if isinstance(message, Renew)]


def read_late(decode: DecodeSide, prefill: PrefillSide) -> None:
    """R's bytes land 31 s after ``Prefill`` was sent; no renewal was acknowledged."""
    decode.request(R, prefill)
    decode.ticket(prefill.compute(R, decode.now, num_blocks=3))
    decode.now += 31


def test_landing_within_the_lease_needs_no_round_trip(
    decode: DecodeSide, prefill: PrefillSide
) -> None:
    decode.request(R, prefill)
    decode.ticket(prefill.compute(R, decode.now, num_blocks=3))
    decode.now += 29.9
    decode.land_all()
    assert R in decode.delivered
    assert renewals(decode) == []


def test_landing_after_the_lease_is_trusted_only_when_confirmed(
    decode: DecodeSide, prefill: PrefillSide
) -> None:
    read_late(decode, prefill)
    decode.land_all()
    assert R not in decode.delivered
    assert renewals(decode)[-1].requests == (R,)
    decode.exchange()  # the source still holds it: it had not looked at its deadlines yet
    assert R in decode.delivered
    assert decode.wrong_positions(R) == []


def test_landing_after_the_source_gave_the_blocks_away_is_void(
    decode: DecodeSide, prefill: PrefillSide
) -> None:
    read_late(decode, prefill)
    assert prefill.expire(decode.now) == [R]
    decode.land_all()  # reads what the blocks hold now
    decode.exchange()
    assert decode.failed[R].is_retryable
    assert "void" in decode.failed[R].reason
    assert R not in decode.delivered
    assert decode.num_free == 10


def test_mutation_without_the_lease_check_foreign_bytes_are_delivered(
    monkeypatch: pytest.MonkeyPatch, decode: DecodeSide, prefill: PrefillSide
) -> None:
    monkeypatch.setattr(Receiving, "is_proven", property(lambda _: True))
    read_late(decode, prefill)
    prefill.expire(decode.now)
    decode.land_all()
    assert R in decode.delivered
    assert len(decode.wrong_positions(R)) == 3


def test_renewals_prove_a_long_prefill_and_a_long_read(
    decode: DecodeSide, prefill: PrefillSide
) -> None:
    """Renewals go out by the reader's own deadline, one message for all requests of a source."""
    other = owner("other")
    decode.request(R, prefill)
    decode.request(other, prefill)
    assert prefill.book.open(R, reader="D")
    assert prefill.book.open(other, reader="D")
    start = decode.now
    while decode.now < start + 60:
        deadline = decode.reader.next_deadline()
        assert deadline is not None
        decode.now = deadline
        decode.tick()
        decode.exchange()
    assert len(renewals(decode)) == 12
    assert set(renewals(decode)[0].requests) == {R, other}
    decode.ticket(prefill.compute(R, decode.now, num_blocks=3))
    decode.land_all()
    assert R in decode.delivered


def test_an_unanswered_renewal_proves_nothing(decode: DecodeSide, prefill: PrefillSide) -> None:
    decode.request(R, prefill)
    decode.ticket(prefill.compute(R, decode.now, num_blocks=3))
    decode.now += 25
    decode.tick()
    decode.outbox.clear()  # lost with the network
    decode.now += 6
    decode.land_all()
    assert R not in decode.delivered


def test_an_acknowledgement_counts_from_the_sending_of_its_renewal(
    decode: DecodeSide, prefill: PrefillSide
) -> None:
    """Its answer was under way for 20 s: those do not lengthen the lease."""
    decode.request(R, prefill)
    decode.ticket(prefill.compute(R, decode.now, num_blocks=3))
    decode.now += 5
    decode.tick()
    sent = renewals(decode)[-1]
    answer = prefill.book.renew(sent, decode.now)
    decode.now += 20
    decode.carry_out(decode.reader.renewed(answer, prefill.incarnation, decode.now))
    decode.now += 10.5  # 35.5 s after the start: the renewal at 5 s proves until 35 s
    decode.outbox.clear()
    decode.land_all()
    assert R not in decode.delivered


def test_a_stale_or_foreign_acknowledgement_is_dropped(
    decode: DecodeSide, prefill: PrefillSide
) -> None:
    read_late(decode, prefill)
    decode.land_all()
    sequence = renewals(decode)[-1].sequence
    foreign = Renewed(sequence, "other", (R,), (), 30.0)  # type: ignore[arg-type]
    unknown = Renewed(sequence + 7, prefill.incarnation, (R,), (), 30.0)
    for answer in (foreign, unknown):
        decode.carry_out(decode.reader.renewed(answer, prefill.incarnation, decode.now))
    assert R not in decode.delivered
    assert decode.reader.stats.stale["renewed"] == 2
    decode.exchange()
    assert R in decode.delivered


def test_a_confirmation_that_never_comes_is_bounded(
    decode: DecodeSide, prefill: PrefillSide
) -> None:
    read_late(decode, prefill)
    decode.land_all()
    decode.outbox.clear()
    for _ in range(20):
        deadline = decode.reader.next_deadline()
        if deadline is None:
            break
        decode.now = deadline
        decode.tick()
        decode.outbox.clear()
    assert "does not confirm" in decode.failed[R].reason
    assert decode.num_free == 10


def test_acknowledgement_sent_before_a_landing_does_not_confirm_it(
    decode: DecodeSide, prefill: PrefillSide
) -> None:
    """Renewed at 5 s (proves until 35 s), landed at 40 s: another round trip is needed."""
    decode.request(R, prefill)
    decode.ticket(prefill.compute(R, decode.now, num_blocks=3))
    decode.now += 5
    decode.tick()
    early = prefill.book.renew(renewals(decode)[-1], decode.now)
    decode.now += 35
    decode.land_all()
    decode.outbox.clear()
    decode.carry_out(decode.reader.renewed(early, prefill.incarnation, decode.now))
    assert R not in decode.delivered


def test_void_after_delivery_harms_nobody(decode: DecodeSide, prefill: PrefillSide) -> None:
    decode.request(R, prefill)
    decode.ticket(prefill.compute(R, decode.now, num_blocks=3))
    decode.land_all()
    void = prefill.book.void(R)
    decode.carry_out(decode.reader.renewed(void, prefill.incarnation, decode.now))
    assert R in decode.delivered
    assert R not in decode.failed
