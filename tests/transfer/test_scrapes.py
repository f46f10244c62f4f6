"""Metrics of transfers are read by another thread: whole at any moment, and from the start on."""

import itertools
from collections.abc import Iterator

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.openmetrics import exposition
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from core.ids import Incarnation
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
        metrics.in_flight(lambda: reader.num_operations)
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


@pytest.mark.parametrize("role", ROLES)
def test_prometheus_own_parser_takes_what_is_exported(
    role: str, decode: DecodeSide, prefill: PrefillSide
) -> None:
    """Two families of one name are accepted by the old text format, and refused by the new one."""
    text = exposition.generate_latest(registry_of(role, decode, prefill)).decode()
    names = [family.name for family in text_string_to_metric_families(text)]
    assert len(names) == len(set(names))


def paths_of(registry: CollectorRegistry) -> dict[str, float]:
    """Return the number of peers by path, those of none left out."""
    (family,) = [f for f in registry.collect() if f.name == "sluice_kv_path_peers"]
    return {sample.labels["path"]: sample.value for sample in family.samples if sample.value}


def test_a_peers_path_is_unknown_until_bytes_came_and_never_again_before_it_is_lost(
    decode: DecodeSide,
) -> None:
    registry = CollectorRegistry()
    metrics = TransferMetrics(decode.reader.stats, registry, role="decode", transport="test")
    first, second = Incarnation("P1"), Incarnation("P2")
    for peer in (first, second):
        metrics.observe_path(peer, "unknown")
    assert paths_of(registry) == {"unknown": 2}
    metrics.observe_path(first, "shared_memory")
    metrics.observe_path(first, "unknown")
    assert paths_of(registry) == {"shared_memory": 1, "unknown": 1}
    # When the peer comes to be read over TCP, that is what is told
    metrics.observe_path(first, "tcp")
    assert paths_of(registry) == {"tcp": 1, "unknown": 1}
    for peer in (first, first, second):
        metrics.forget_peer(peer)
    assert paths_of(registry) == {}
