"""The demo fails when what it is to show did not happen, however good the answers look."""

from typing import Any

import pytest

from core.config import SluiceConfig
from core.errors import SluiceError
from deploy.commands.demo import DemoResult, check_paths
from deploy.commands.demo_prompts import DEMO_PROMPTS

LONG = next(prompt for prompt in DEMO_PROMPTS if prompt.long)


def result(*, input_tokens: int = 800, **stats: Any) -> DemoResult:
    return DemoResult(
        prompt=LONG,
        input_tokens=input_tokens,
        output_tokens=64,
        ttft_s=1.0,
        itl_s=0.1,
        stats=stats,
    )


def test_a_long_prompt_that_came_in_several_tickets_passes() -> None:
    check_paths([result(path="disaggregated", num_tickets=2)], SluiceConfig())


def test_a_long_prompt_that_was_served_locally_fails() -> None:
    with pytest.raises(SluiceError, match="served local"):
        check_paths([result(path="local")], SluiceConfig())


def test_a_long_prompt_that_came_in_one_ticket_fails() -> None:
    with pytest.raises(SluiceError, match="single ticket"):
        check_paths([result(path="disaggregated", num_tickets=1)], SluiceConfig())


def test_one_ticket_is_right_where_the_prompt_fits_one_step() -> None:
    config = SluiceConfig.parse({"scheduler": {"max_batch_tokens": 4096}}, source="test")
    check_paths([result(path="disaggregated", num_tickets=1)], config)


def test_colocated_serving_has_nothing_to_disaggregate() -> None:
    config = SluiceConfig.parse({"deploy": {"prefill": 0}}, source="test")
    check_paths([result(path="local")], config)
