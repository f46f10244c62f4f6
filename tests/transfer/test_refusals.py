"""Strangers decide how many requests are refused, and must not decide how much is logged."""

import pytest

from transfer.refusals import LOG_INTERVAL_S, Refusals


def test_one_line_per_reason_and_interval_with_the_sum_of_the_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    refusals = Refusals()
    for _ in range(1000):
        refusals.record("malformed", now_s=5.0)
    refusals.record("outside", now_s=5.0)
    refusals.record("malformed", now_s=5.0 + LOG_INTERVAL_S - 0.01)
    assert refusals.count == 1002
    refusals.record("malformed", now_s=5.0 + LOG_INTERVAL_S)
    assert [record.getMessage() for record in caplog.records] == [
        "read requests refused reason=malformed count=1 total=1",
        "read requests refused reason=outside count=1 total=1001",
        "read requests refused reason=malformed count=1001 total=1003",
    ]
