"""Metrics of transfers are read by another thread: whole at any moment, and from the start on."""

import itertools
from collections.abc import Iterator

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from core.messages import PrefillFailed
from tests.scraping import scrape
from tests.transfer.two_sides import DecodeSide, PrefillSide, owner
from transfer.metrics import TransferMetrics

ROLES = ("decode", "prefill")


def registry_of(role: str, decode: DecodeSide, prefill: PrefillSide) -> CollectorRegistry:
    """Return what a worker of ``role`` exports of its transfers."""
    stats = decode.reader.stats if role == "decode" else prefill.book.stats
    registry = CollectorRegistry()
    metrics = TransferMetrics(stats, registry, role=role, transport="test")
    reader, book = decode.reader, prefill.book
    if role == "decode":
        metrics.gauge("in_flight", "See Receiver", lambda: reader.num_operations)
        metrics.gauge("receiving", "See Receiver", lambda: reader.num_receiving)
    else:
        metrics.gauge("leases", "See PrefillWorker", lambda: book.num_leased)
    return registry


def lives(decode: DecodeSide, prefill: PrefillSide) -> Iterator[None]:
    """Requests for ever, a few changes at a time, each ending in another way."""
    for at in itertools.count():
        who = owner(f"{at}")
        decode.request(who, prefill)
        yield
        ticket = prefill.compute(who, decode.now, num_blocks=2)
        decode.ticket(ticket)
        yield
        match at % 4:
            case 0:
                decode.land_all()
            case 1:
                decode.cancel(who)
                decode.land_all()
            case 2:
                failed = PrefillFailed(*who, prefill.incarnation, "no reason")
                decode.carry_out(decode.reader.prefill_failed(failed, decode.now))
                decode.land_all()
            case _:
                decode.land_all()
                decode.ticket(ticket)
        yield
        decode.exchange()
        decode.forget(who)
        yield


@pytest.mark.parametrize("role", ROLES)
def test_a_scrape_is_whole_whatever_happens_during_it(
    role: str, decode: DecodeSide, prefill: PrefillSide
) -> None:
    changes = lives(decode, prefill)

    scrape(registry_of(role, decode, prefill), lambda: next(changes))

    assert decode.reader.stats.failures["prefill"] > 1
    assert prefill.book.stats.lease_events["withdrawn"] > 1


@pytest.mark.parametrize("role", ROLES)
def test_every_series_is_there_before_its_first_event_and_no_other_comes(
    role: str, decode: DecodeSide, prefill: PrefillSide
) -> None:
    def read() -> set[str]:
        lines = generate_latest(registry_of(role, decode, prefill)).decode().splitlines()
        names = {line.rpartition(" ")[0] for line in lines if line[0] != "#"}
        return {name for name in names if "_created" not in name}

    before = read()
    assert f'sluice_kv_lease_events_total{{event="expired",role="{role}"}}' in before
    assert f'sluice_kv_stale_rejects_total{{kind="released",role="{role}"}}' in before
    changes = lives(decode, prefill)
    for _ in range(100):
        next(changes)
    assert read() == before


def test_leases_are_counted_where_they_begin_and_end(
    decode: DecodeSide, prefill: PrefillSide
) -> None:
    """The count is of requests with a ticket out: those computed, and those given up, are apart."""
    book = prefill.book
    for name in "ABC":
        assert book.open(owner(name), reader="D")
    assert book.num_leased == 0
    for name in "ABAB":
        prefill.compute(owner(name), decode.now, num_blocks=1)
    assert book.num_leased == 2
    assert book.revoke(owner("A")) is False
    assert book.revoke(owner("C")) is True
    assert book.num_leased == 2
    assert prefill.expire(decode.now + 1000) == [owner("A"), owner("B")]
    assert book.num_leased == 0
