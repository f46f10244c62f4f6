"""The window benchmark compares what it says: one model, one pool, and blocks on one side only."""

import json
from pathlib import Path

import pytest

from bench import windows
from bench.windows import OFF, ON, Results, parse, ratios_of
from bench.windows_blocks import resident_blocks, sent_nbytes
from bench.windows_serving import keep_everything
from core.kv_layout import KVGroup, KVLayout
from tests.engine.tiny_models import make_tiny_model

GROUPS = (KVGroup((0,), window=64, num_sinks=16, heads=(0,)), KVGroup((0,), heads=(1,)))
LAYOUT = KVLayout(GROUPS, 16, num_kv_heads=2, head_dim=4, dtype="float32")
SMALL = ["--quick", "--prompt-tokens", "160", "--output-tokens", "80", "--longest", "8192"]


def test_whole_run_ends_with_one_json_line_and_sound_oracles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = make_tiny_model("llama", tmp_path / "llama")
    monkeypatch.setattr("bench.load._TOKEN_IDS", range(100, 500))
    monkeypatch.setattr("sys.argv", ["bench.windows", *SMALL, "--model", str(model)])

    assert windows.main() == 0

    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["bench"] == "windows"
    assert set(found) == {"bench", "ratios", "figures", "machine", "missing"}
    assert found["ratios"]["both sides said the same"] == 1
    assert found["ratios"]["no block was lost"] == 1
    assert found["figures"][ON]["pruned_blocks"] > 0
    assert found["figures"][OFF]["pruned_blocks"] == 0
    assert found["figures"][ON]["sequences_per_step"] > found["figures"][OFF]["sequences_per_step"]


def test_ratios_are_normalized_to_the_aims() -> None:
    base = {"requests": 2, "failed_requests": 0, "lost_blocks": 0, "preemptions": 0}
    on = base | {"output_tok_s": 160.0, "ttft_ms_p99": 50.0, "pruned_blocks": 3}
    off = base | {"output_tok_s": 100.0, "ttft_ms_p99": 100.0, "pruned_blocks": 0}
    results = Results(serving={ON: [on], OFF: [off]}, equal_outputs=[True])

    found = ratios_of(results, clients=6)

    assert found["output tok/s, at least 1.6 times that without recycling"] == 1.0
    assert found["TTFT p99, at most half of that without recycling"] == 1.0


def test_ratios_without_released_blocks_or_with_other_words_fail_an_oracle() -> None:
    base = {"requests": 2, "failed_requests": 0, "lost_blocks": 0, "preemptions": 0}
    same = base | {"output_tok_s": 1.0, "ttft_ms_p99": 1.0, "pruned_blocks": 0}
    results = Results(serving={ON: [same], OFF: [same]}, equal_outputs=[True, False])

    found = ratios_of(results, clients=6)

    assert found["blocks were released behind windows, on one side only"] == 0.0
    assert found["both sides said the same"] == 0.0


def test_side_that_keeps_everything_releases_nothing_and_sends_all() -> None:
    whole = keep_everything(LAYOUT)

    assert resident_blocks(LAYOUT, [160, 320]) == {160: [5, 10], 320: [5, 20]}
    assert resident_blocks(whole, [160, 320]) == {160: [10, 10], 320: [20, 20]}
    assert sent_nbytes(whole, 320) == 40 * LAYOUT.block_nbytes
    assert sent_nbytes(LAYOUT, 320) == 25 * LAYOUT.block_nbytes


def test_options_give_way_to_what_is_asked_for() -> None:
    assert parse([]).prompt_tokens == 512
    assert parse(["--quick"]).prompt_tokens == 256
    assert parse(["--quick", "--prompt-tokens", "32"]).prompt_tokens == 32
