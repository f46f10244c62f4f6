"""The command line, and the JSON object that others read."""

import json

import pytest

from bench.measure import Result
from bench.serve import SYSTEMS, parse, report

SOUND = {"failed_requests": 0, "output_tok_s": 20.0, "ttft_ms_p50": 100.0}


def test_default_load_is_the_documented_one() -> None:
    arguments = parse([])

    assert arguments.systems == ("sluice-1p1d", "sluice-colocated", "transformers", "vllm")
    assert arguments.concurrency == (1, 8, 32)
    assert (arguments.prompt_tokens, arguments.output_tokens, arguments.repeats) == (512, 128, 3)


def test_quick_measures_only_ours_but_gives_way_to_what_is_asked_for() -> None:
    assert parse(["--quick"]).systems == ("sluice-1p1d", "sluice-colocated")
    assert parse(["--quick", "--systems", "vllm"]).systems == ("vllm",)
    assert parse(["--quick", "--concurrency", "2,4"]).concurrency == (2, 4)


@pytest.mark.parametrize(
    "arguments", [["--systems", "tgi"], ["--concurrency", "0"], ["--concurrency", "1,x"]]
)
def test_wrong_argument_starts_nothing(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as excinfo:
        parse(arguments)

    assert excinfo.value.code == 2
    assert arguments[0] in capsys.readouterr().err


def test_report_is_one_json_object_with_ratios_and_figures() -> None:
    results = {
        "sluice-1p1d": Result({1: SOUND}, {"start_s": 12.34567}),
        "vllm": Result({1: {**SOUND, "output_tok_s": 10.0}}),
    }

    found = json.loads(json.dumps(report(results, ["vllm-1p1d: not asked for"], {"cores": 2}, {})))

    assert found["bench"] == "serve"
    assert found["ratios"] == {
        "output tok/s at c1, at least 0.92 of colocated vLLM's": 2.1739,
        "TTFT p50 at c1, at most 1.6 of colocated vLLM's": 1.6,
    }
    assert found["figures"]["sluice-1p1d"]["c1"]["output_tok_s"] == 20.0
    assert found["figures"]["sluice-1p1d"]["processes"] == {"start_s": 12.346}
    assert found["machine"] == {"cores": 2}
    assert found["missing"] == ["vllm-1p1d: not asked for"]


def test_missing_peer_leaves_no_ratio() -> None:
    found = report({"sluice-1p1d": Result({1: SOUND})}, ["vllm: not made"], {}, {})

    assert found["ratios"] == {}
    assert found["missing"] == ["vllm: not made"]


def test_every_system_has_one_name() -> None:
    assert len(set(SYSTEMS)) == len(SYSTEMS)
