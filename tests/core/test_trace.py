"""A trace is kept in a bounded place and costs next to nothing.

The failure guarded against: a worker that runs for a month and has kept something of every
request, or a request with endless renewals that pushes all others out.
"""

from itertools import count

import msgspec
import pytest

from core.errors import TransferError
from core.ids import Attempt, Incarnation, Owner, RequestId, WorkerId
from core.messages import TraceReport, decode, encode
from core.trace import Recorder, TraceEvent


def owner(name: str, attempt: int = 1) -> Owner:
    return RequestId(name), Attempt(attempt)


@pytest.fixture
def recorder() -> Recorder:
    ticks = count(1)
    return Recorder(lambda: float(next(ticks)), max_requests=3, max_events=4)


def names(recorder: Recorder, request: str) -> list[str]:
    return [entry.event for entry in recorder.events(RequestId(request))]


def test_entries_come_back_in_order_with_their_times_and_values(recorder: Recorder) -> None:
    recorder.record(owner("A"), "received", tokens=7)
    recorder.record(owner("B"), "received", tokens=9)
    recorder.record(owner("A", 2), "read_landed", nbytes=64, path="tcp")
    first, second = recorder.events(RequestId("A"))
    assert (first.at_s, first.event, first.attempt, first.values) == (
        1.0,
        "received",
        1,
        {"tokens": 7},
    )
    assert (second.at_s, second.attempt) == (3.0, 2)
    assert second.values == {"nbytes": 64, "path": "tcp"}


def test_what_happened_before_it_had_a_name_keeps_its_own_time(recorder: Recorder) -> None:
    recorder.record_at(0.25, owner("A"), "arrived")
    assert recorder.events(RequestId("A"))[0].at_s == 0.25


def test_the_oldest_request_goes_when_there_is_one_too_many(recorder: Recorder) -> None:
    for name in "ABCD":
        recorder.record(owner(name), "received")
        recorder.check_invariants()
    assert names(recorder, "A") == []
    assert names(recorder, "B") == ["received"]
    # A late entry of a request that is gone begins a new one, and is bounded as any other
    recorder.record(owner("A"), "released")
    assert (names(recorder, "A"), names(recorder, "B")) == (["released"], [])
    recorder.check_invariants()


def test_a_request_has_a_bounded_number_of_entries_and_always_its_end(recorder: Recorder) -> None:
    for _ in range(100):
        recorder.record(owner("A"), "lease_renewed")
    recorder.record(owner("A"), "failed", reason="the source was lost")
    recorder.check_invariants()
    assert names(recorder, "A") == ["lease_renewed"] * 4 + ["failed"]


def test_nothing_is_kept_where_nothing_is_to_be(recorder: Recorder) -> None:
    off = Recorder(recorder.now, max_requests=0)
    off.record(owner("A"), "received")
    off.check_invariants()
    assert off.events(RequestId("A")) == ()


def report(**changes: object) -> bytes:
    event = TraceEvent(1.5, "read_landed", Attempt(1), {"nbytes": 64, "path": "tcp"})
    event = msgspec.structs.replace(event, **changes)
    life = Incarnation("life-1")
    return encode(TraceReport(1, WorkerId("decode-0"), "decode", life, 2.5, (event,)))


@pytest.mark.parametrize(
    "changes", [{}, {"at_s": -3.0e7}, {"event": "known_to_a_newer_version"}, {"attempt": 0}]
)
def test_a_report_comes_as_it_was_sent(changes: dict[str, object]) -> None:
    assert encode(decode(report(**changes))) == report(**changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"at_s": float("nan")},
        {"at_s": 1e300},
        {"event": "x" * 300},
        {"attempt": -1},
        {"values": {"reason": "x" * 2000}},
        {"values": {f"v{i}": i for i in range(100)}},
    ],
)
def test_a_report_beyond_all_bounds_is_none(changes: dict[str, object]) -> None:
    with pytest.raises(TransferError):
        decode(report(**changes))
