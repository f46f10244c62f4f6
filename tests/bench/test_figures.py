"""Figures are medians and percentiles of what arrived; a ratio of 1.0 is exactly the aim."""

import pytest

from bench.aims import SERVE_AIMS
from bench.figures import Aim, combine, ratios, run_figures
from bench.samples import LoadPlan, LoadRun, RequestSample

FAILED = RequestSample(sent=0.0, arrivals=(), output_tokens=0, failure="HTTP 503")


def test_figures_of_one_stream() -> None:
    # Given four tokens, one per event, 100 ms after the request and then 10, 10 and 80 ms apart
    sample = RequestSample(1.0, (1.1, 1.11, 1.12, 1.2), 4)

    figures = run_figures(LoadRun(1.0, 1.25, [sample]))

    assert figures["output_tok_s"] == pytest.approx(16)
    assert figures["ttft_ms_p50"] == pytest.approx(100)
    assert figures["itl_ms_p50"] == pytest.approx(10)
    assert 10 < figures["itl_ms_p99"] <= 80
    assert figures["tpot_ms_p50"] == pytest.approx(100 / 3)
    assert figures["tokens_per_event"] == 1


def test_event_of_several_tokens_is_one_gap_not_several_small_ones() -> None:
    # Given four tokens that arrive as one, then three at once 90 ms later
    figures = run_figures(LoadRun(0.0, 1.0, [RequestSample(0.0, (0.1, 0.19), 4)]))

    assert figures["itl_ms_p50"] == pytest.approx(90)
    assert figures["tokens_per_event"] == 2
    assert figures["tpot_ms_p50"] == pytest.approx(30)


def test_percentiles_are_over_all_requests_together() -> None:
    # Given 99 gaps of 1 ms in one stream and one of 1 s in another
    steady = RequestSample(0.0, tuple(i / 1000 for i in range(100)), 100)
    stalled = RequestSample(0.0, (0.0, 1.0), 2)

    figures = run_figures(LoadRun(0.0, 2.0, [steady, stalled]))

    assert figures["itl_ms_p50"] == pytest.approx(1)
    assert figures["itl_ms_p99"] > 1


def test_failed_requests_are_counted_and_add_no_tokens() -> None:
    figures = run_figures(LoadRun(0.0, 1.0, [RequestSample(0.0, (0.5,), 1), FAILED]))

    assert (figures["requests"], figures["failed_requests"]) == (2, 1)
    assert figures["output_tok_s"] == 1


def test_run_without_any_success_has_no_percentiles() -> None:
    figures = run_figures(LoadRun(0.0, 1.0, [FAILED]))

    assert figures == {"requests": 1, "failed_requests": 1, "output_tok_s": 0}


def test_repeats_combine_to_medians_and_add_up_counts() -> None:
    repeats = [
        {"requests": 4, "failed_requests": failed, "output_tok_s": rate, "ttft_ms_p50": ttft}
        for failed, rate, ttft in ((0, 10.0, 7.0), (1, 30.0, 5.0), (0, 11.0, 90.0))
    ]

    assert combine(repeats) == {
        "requests": 12,
        "failed_requests": 1,
        "output_tok_s": 11.0,
        "output_tok_s_min": 10.0,
        "output_tok_s_max": 30.0,
        "ttft_ms_p50": 7.0,
    }


def test_figure_that_one_repeat_lacks_is_left_out() -> None:
    counts = {"requests": 1, "failed_requests": 0, "output_tok_s": 1.0}

    assert "ttft_ms_p50" not in combine([{**counts, "ttft_ms_p50": 1.0}, counts])


@pytest.mark.parametrize(
    ("better", "ours", "met"),
    [
        ("higher", 92.0, True),
        ("higher", 91.9, False),
        ("lower", 92.0, True),
        ("lower", 92.1, False),
    ],
)
def test_ratio_reaches_one_exactly_where_the_aim_is_met(
    *, better: str, ours: float, met: bool
) -> None:
    aim = Aim("aim", "a", "b", 1, "figure", 0.92, better)  # type: ignore[arg-type]

    assert (aim.ratio(ours, 100.0) >= 1.0) is met


def test_serve_aims_become_ratios_of_both_systems_figures() -> None:
    ours = {
        1: {"failed_requests": 0, "output_tok_s": 24.8, "ttft_ms_p50": 294.0},
        32: {"failed_requests": 0, "itl_ms_p99": 223.0},
    }
    theirs = {
        1: {"failed_requests": 0, "output_tok_s": 26.9, "ttft_ms_p50": 184.0},
        32: {"failed_requests": 0, "itl_ms_p99": 971.0},
    }

    found = ratios(SERVE_AIMS, {"sluice-1p1d": ours, "vllm": theirs})

    assert found == {
        "output tok/s at c1, at least 0.92 of colocated vLLM's": 1.0021,
        "TTFT p50 at c1, at most 1.6 of colocated vLLM's": 1.0014,
        "ITL p99 at c32, at most 0.25 of colocated vLLM's": 1.0886,
    }


def test_aim_without_its_peer_has_no_ratio() -> None:
    ours = {1: {"failed_requests": 0, "output_tok_s": 24.8, "ttft_ms_p50": 294.0}}

    assert ratios(SERVE_AIMS, {"sluice-1p1d": ours}) == {}


def test_load_with_failed_requests_has_no_ratio() -> None:
    ours = {1: {"failed_requests": 1, "output_tok_s": 24.8, "ttft_ms_p50": 294.0}}
    theirs = {1: {"failed_requests": 0, "output_tok_s": 26.9, "ttft_ms_p50": 184.0}}

    assert ratios(SERVE_AIMS, {"sluice-1p1d": ours, "vllm": theirs}) == {}


@pytest.mark.parametrize(("concurrency", "rounds"), [(1, 4), (8, 4), (32, 2), (128, 2)])
def test_many_clients_send_fewer_requests_each(concurrency: int, rounds: int) -> None:
    assert LoadPlan((concurrency,), 512, 128, 3).rounds_at(concurrency) == rounds
