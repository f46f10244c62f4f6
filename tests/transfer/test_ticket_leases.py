"""The prefill side frees each promised block exactly once: not too early, and not too late.

Field failures guarded: blocks stranded for minutes after a reader died or refused, expiry that
crashes the engine, and a late acknowledgement that frees a block which somebody else owns now.
"""

import pytest

from core.ids import Incarnation, Owner
from core.messages import FirstToken, PieceId, Released, Renew, Withdraw
from tests.transfer.two_sides import owner
from transfer.tickets import Offer, TicketBook

P = Incarnation("P")
R = owner("r")
OFFER = Offer(PieceId(0, 1, 0), (), 40, last=True, first_token=FirstToken(7))


@pytest.fixture
def book() -> TicketBook:
    return TicketBook(P, 30.0, extension_s=20.0)


def lease(book: TicketBook, who: Owner = R, now: float = 0.0, **options: float) -> None:
    assert book.open(who, reader="D", **options)
    assert book.issue(who, OFFER, now) is not None


def test_d01_pin_and_release_once(book: TicketBook) -> None:
    lease(book)
    assert book.num_leased == 1
    assert book.released(Released(*R, P)) == R
    assert book.released(Released(*R, P)) is None
    assert book.next_deadline() is None
    assert len(book) == 0


def test_d02_heartbeat_extends_from_its_receipt(book: TicketBook) -> None:
    lease(book)
    assert book.renew(Renew(1, (R,)), 25.0).requests == (R,)
    assert book.expire(30.0) == []
    assert book.expire(44.9) == []
    assert book.next_deadline() == 45.0
    assert book.expire(45.0) == [R]


def test_d02_extension_never_shortens(book: TicketBook) -> None:
    lease(book)
    book.renew(Renew(1, (R,)), 1.0)  # 21 s would be earlier than 30 s
    assert book.next_deadline() == 30.0


def test_d02_a_later_ticket_extends_the_lease_of_the_earlier(book: TicketBook) -> None:
    lease(book)
    assert book.issue(R, OFFER, 10.0) is not None
    assert book.next_deadline() == 40.0


def test_d04_clocks_never_meet() -> None:
    """A lease is a duration in messages, and a deadline on the holder's own clock only."""
    book = TicketBook(P, 30.0)
    assert book.open(R, reader="D")
    ticket = book.issue(R, OFFER, 20.0)
    assert ticket is not None
    assert ticket.lease_s == 30.0
    assert book.next_deadline() == 50.0
    assert book.renew(Renew(1, (R,)), 20.0).lease_s == 30.0


def test_d06_late_acknowledgement_is_void_and_counted(book: TicketBook) -> None:
    lease(book)
    assert book.expire(31.0) == [R]
    assert book.released(Released(*R, P)) is None
    assert book.stats.lease_events["late"] == 1
    assert book.void(R).void == (R,)
    assert book.renew(Renew(4, (R,)), 32.0).void == (R,)


def test_d07_reader_refuses_before_any_ticket(book: TicketBook) -> None:
    assert book.open(R, reader="D")
    assert book.withdraw(Withdraw(*R)) == R
    assert book.issue(R, OFFER, 1.0) is None, "the chunk in flight offers nothing any more"
    assert len(book) == 0
    assert book.next_deadline() is None


def test_d08_source_gives_up_while_the_reader_reads(book: TicketBook) -> None:
    """Until the reader knows, it may trust what it reads: the blocks stay."""
    lease(book)
    assert book.revoke(R) is False
    assert book.renew(Renew(1, (R,)), 5.0).void == (R,)
    assert book.issue(R, OFFER, 5.0) is None
    assert book.next_deadline() == 30.0
    assert book.withdraw(Withdraw(*R)) == R


def test_d08_without_a_ticket_the_blocks_are_free_at_once(book: TicketBook) -> None:
    assert book.open(R, reader="D")
    assert book.revoke(R) is True
    assert len(book) == 0


def test_d08_revoked_and_never_answered_ends_with_the_lease(book: TicketBook) -> None:
    lease(book)
    book.revoke(R)
    assert book.expire(30.0) == [R]


def test_d11_early_heartbeat_is_harmless(book: TicketBook) -> None:
    """The request is still computed: nothing to extend, and the lease starts at its ticket."""
    assert book.open(R, reader="D")
    answer = book.renew(Renew(1, (R,)), 5.0)
    assert answer.requests == (R,)
    assert answer.void == ()
    assert book.next_deadline() is None
    assert book.expire(1000.0) == []
    book.issue(R, OFFER, 1000.0)
    assert book.next_deadline() == 1030.0


@pytest.mark.parametrize("end", ["released", "expired", "withdrawn"])
def test_d14_a_consumed_request_is_never_served_again(book: TicketBook, end: str) -> None:
    lease(book)
    if end == "released":
        book.released(Released(*R, P))
    elif end == "expired":
        book.expire(30.0)
    else:
        book.withdraw(Withdraw(*R))
    assert book.open(R, reader="D") is False
    assert book.issue(R, OFFER, 50.0) is None
    assert book.renew(Renew(1, (R,)), 50.0).void == (R,)
    assert book.released(Released(*R, P)) is None


def test_d15_a_release_for_an_older_life_frees_nothing(book: TicketBook) -> None:
    lease(book)
    assert book.released(Released(*R, Incarnation("before"))) is None
    assert book.stats.stale["released_incarnation"] == 1
    assert R in book


def test_d17_mixed_leases_expire_each_at_its_own_time(book: TicketBook) -> None:
    long, short = owner("long"), owner("short")
    lease(book, long, lease_s=480.0)
    lease(book, short)
    assert book.next_deadline() == 30.0
    assert book.expire(30.0) == [short]
    assert book.expire(479.0) == []
    assert book.expire(480.0) == [long]


def test_h01_a_newer_attempt_is_untouched_by_messages_of_the_older(book: TicketBook) -> None:
    first, second = owner("r", 1), owner("r", 2)
    lease(book, first)
    lease(book, second)
    assert book.withdraw(Withdraw(*first)) == first
    assert book.released(Released(*first, P)) is None
    assert second in book
    assert book.open(first, reader="D") is False
    assert book.released(Released(*second, P)) == second


def test_h01_an_older_attempt_that_arrives_late_is_not_computed(book: TicketBook) -> None:
    lease(book, owner("r", 2))
    assert book.open(owner("r", 1), reader="D") is False
    assert book.stats.stale["prefill"] == 1


def test_h02_reader_lost_is_not_reader_dead(book: TicketBook) -> None:
    """It may be partitioned and still trust what it reads; what has no ticket is free at once."""
    computing = owner("computing")
    lease(book)
    assert book.open(computing, reader="D")
    assert book.open(owner("elsewhere"), reader="E")
    assert book.reader_lost("D") == [computing]
    assert R in book
    assert book.reader_dead("D") == [R]
    assert len(book) == 1


def test_i10_unknown_messages_are_counted_and_change_nothing(book: TicketBook) -> None:
    lease(book)
    nobody = owner("nobody")
    assert book.withdraw(Withdraw(*nobody)) is None
    assert book.released(Released(*nobody, P)) is None
    assert book.revoke(nobody) is False
    assert {kind: n for kind, n in book.stats.stale.items() if n} == {"withdrawn": 1, "released": 1}
    assert book.num_leased == 1


def test_mutation_extension_by_assignment_frees_too_early(
    monkeypatch: pytest.MonkeyPatch, book: TicketBook
) -> None:
    """D02 has teeth: without the max rule an early renewal shortens the lease."""

    def assign(entry: object, deadline: float) -> None:
        entry.deadline = deadline  # type: ignore[attr-defined]

    monkeypatch.setattr("transfer.tickets._Entry.extend", assign)
    lease(book)
    book.renew(Renew(1, (R,)), 1.0)
    assert book.expire(21.0) == [R], "the reader still trusts this lease until 30 s"


def test_d14_another_reader_can_neither_release_nor_withdraw_nor_renew(book: TicketBook) -> None:
    """A reader whose key is good may still name requests that are none of its."""
    lease(book)
    assert book.released(Released(*R, P), reader="E") is None
    assert book.withdraw(Withdraw(*R), reader="E") is None
    assert book.renew(Renew(1, (R,)), 25.0, reader="E").void == (R,)
    assert book.next_deadline() == 30.0
    assert book.stats.stale["released"] == book.stats.stale["withdrawn"] == 1
    assert book.renew(Renew(1, (R,)), 25.0, reader="D").requests == (R,)
    assert book.released(Released(*R, P), reader="D") == R
