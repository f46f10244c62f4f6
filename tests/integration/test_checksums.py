"""Every block that crosses is compared with what was sent, through real workers and real UCX."""

from pathlib import Path

import pytest

from tests.integration.models import VOCAB_SIZE, tiny_model
from tests.integration.parity import FLOAT32, assert_same, run
from tests.integration.requests import generate_reference, prompt_of
from tests.integration.stack import Stack

pytestmark = [pytest.mark.ucx, pytest.mark.timeout(300)]


def test_i07_blocks_arrive_as_they_were_sent(tmp_path: Path) -> None:
    model_path = tiny_model("llama", tmp_path)
    prompts = [prompt_of(length, VOCAB_SIZE) for length in (65, 200, 333)]
    expected = generate_reference(model_path, prompts, num_tokens=8)
    with Stack.open(
        model_path, model=FLOAT32, transfer={"checksums": True}, own_interpreters=True
    ) as stack:
        answers = run(stack, prompts, 8)
        assert_same(answers, expected, prompts)
        assert {answer["sluice"]["path"] for answer in answers} == {"disaggregated"}
        failures = {
            name: value
            for name, value in stack.metrics("decode-0").items()
            if name.startswith("sluice_kv_checksum_failures_total")
        }
        assert list(failures.values()) == [0.0]
        assert stack.metrics("decode-0")['sluice_admission_reserve_blocks{role="decode"}'] == 1.0
