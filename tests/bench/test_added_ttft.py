"""What disaggregation adds is told only where both ways were measured without a failure."""

from bench.added_ttft import LOCAL, REMOTE, report, share_of
from bench.figures import Figures


def figures(ttft_ms: float, *, failed: int = 0) -> Figures:
    return {"ttft_ms_p50": ttft_ms, "failed_requests": failed}


def test_the_share_is_of_what_local_prefill_takes() -> None:
    share = share_of({LOCAL: figures(200.0), REMOTE: figures(210.0)}, REMOTE)
    assert share is not None
    assert round(share, 6) == 0.05


def test_nothing_is_guessed() -> None:
    assert share_of({REMOTE: figures(210.0)}, REMOTE) is None
    assert share_of({LOCAL: figures(200.0), REMOTE: figures(1.0, failed=1)}, REMOTE) is None
    assert report({REMOTE: figures(1.0)}, [], {}, {})["ratios"] == {}


def test_the_ratio_is_one_where_the_aim_is_just_met() -> None:
    found = report({LOCAL: figures(1000.0), REMOTE: figures(1050.0)}, [], {}, {})["ratios"]
    assert list(found.values()) == [1.0]  # type: ignore[attr-defined]
