"""What the router counts as in time, as a restart, and what it tells a gateway's picker.

The failure guarded against: a goodput that counts only what went well, so that it is best when
everything fails, and an alert on restarts that a worker's first start sets off.
"""

from collections.abc import Awaitable, Callable
from typing import Any

from core.messages import WorkerLoad
from core.vllm_aliases import total_load
from router.metrics import LatencyGoals, RouterMetrics
from tests.router.conftest import RunningRouter

StartRouter = Callable[..., Awaitable[RunningRouter]]
BODY: dict[str, Any] = {"prompt": [9], "max_tokens": 8}


def test_a_goal_that_both_are_within_is_met_and_one_missed_misses_both() -> None:
    metrics = RouterMetrics(LatencyGoals(ttft_s=1.0, itl_s=0.1))
    metrics.count_in_time("m", ttft=True, itl=True)
    metrics.count_in_time("m", ttft=True, itl=False)

    def count(slo: str, met: str) -> float | None:
        labels = {"model": "m", "slo": slo, "met": met}
        return metrics.registry.get_sample_value("sluice_slo_requests_total", labels)

    assert (count("ttft", "true"), count("itl", "true"), count("both", "true")) == (2, 1, 1)
    assert (count("ttft", "false"), count("itl", "false"), count("both", "false")) == (None, 1, 1)
    assert metrics.registry.get_sample_value("sluice_slo_seconds", {"slo": "itl"}) == 0.1


def test_the_load_of_several_workers_is_their_sum_and_what_waits_before_them() -> None:
    loads = [
        WorkerLoad(running=2, waiting=1, queued_tokens=8, free_blocks=5, total_blocks=10),
        WorkerLoad(running=1, free_blocks=10, total_blocks=10),
    ]
    assert total_load(loads, num_waiting=3) == WorkerLoad(
        running=3, waiting=4, queued_tokens=8, free_blocks=15, total_blocks=20
    )
