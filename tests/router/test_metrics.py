"""What the router counts as in time, as a restart, and what it tells a gateway's picker.

The failure guarded against: a goodput that counts only what went well, so that it is best when
everything fails, and an alert on restarts that a worker's first start sets off.
"""

import asyncio

from prometheus_client.parser import text_string_to_metric_families

from core.messages import DesiredWorkers, WorkerLoad
from core.vllm_aliases import total_load
from router.metrics import LatencyGoals, RouterMetrics
from tests.router.conftest import RunningRouter, StartRouter
from tests.router.scripted_worker import say


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


def test_a_counter_with_known_labels_is_there_before_anything_goes_wrong() -> None:
    """A panel of it would be empty, and an alert on its growth would miss the first event."""
    families = text_string_to_metric_families(RouterMetrics().render().decode())
    empty = {each.name for each in families if each.type == "counter" and not each.samples}
    assert empty == {
        "sluice_requests",  # by model, which a client names
        "sluice_slo_requests",
        "sluice_route_decisions",  # most of its combinations cannot be
    }


def test_the_load_of_several_workers_is_their_sum_and_what_waits_before_them() -> None:
    loads = [
        WorkerLoad(running=2, waiting=1, queued_tokens=8, free_blocks=5, total_blocks=10),
        WorkerLoad(running=1, free_blocks=10, total_blocks=10),
    ]
    assert total_load(loads, num_waiting=3) == WorkerLoad(
        running=3, waiting=4, queued_tokens=8, free_blocks=15, total_blocks=20
    )


async def test_a_router_that_nobody_reports_to_says_that_none_is_ready(
    router: RunningRouter,
) -> None:
    """A router that starts while all workers are down would otherwise look like none at all."""
    text = (await router.http.get("/metrics")).text
    for role in ("prefill", "decode"):
        assert f'sluice_workers{{role="{role}",state="ready"}} 0.0' in text


async def test_what_is_wanted_is_shown_once_it_is_known_and_when_the_last_worker_is_gone(
    start_router: StartRouter,
) -> None:
    """It is then, and only then, that ``sluice_workers`` alone cannot tell what is missing."""
    router = await start_router(worker_silence_s=0.5)
    worker = await router.start_worker(say([20]))
    assert "sluice_workers_desired{" not in (await router.http.get("/metrics")).text

    worker.desired = DesiredWorkers(1, prefill=0, decode=2)
    await _until(router, 'sluice_workers_desired{role="decode"}', 2)
    assert await router.metric('sluice_workers_desired{role="prefill"}') == 0
    assert 'sluice_workers_desired{role="prefill"} 0.0' in (await router.http.get("/metrics")).text

    await worker.die()
    await router.until_state("decode-0", None)
    await _until(router, 'sluice_workers{role="decode",state="ready"}', 0)
    assert await router.metric('sluice_workers_desired{role="decode"}') == 2


async def test_for_how_long_the_controller_is_silent_is_shown_where_anybody_was_ever_told(
    router: RunningRouter,
) -> None:
    worker = await router.start_worker(say([20]))
    await router.until_state("decode-0", "ready")
    assert "sluice_controller_silence_seconds NaN" in (await router.http.get("/metrics")).text
    assert (await router.http.get("/status")).json()["controller_silence_s"] is None

    worker.controller_silence_s = 1000.0
    async with asyncio.timeout(20):
        while not await router.metric("sluice_controller_silence_seconds") >= 1000.0:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    assert (await router.http.get("/status")).json()["controller_silence_s"] >= 1000.0

    # A router that is supervised itself hears it, too
    router.lifecycle.hear(DesiredWorkers(1, prefill=0, decode=1))
    assert await router.metric("sluice_controller_silence_seconds") < 1000.0


async def _until(router: RunningRouter, sample: str, value: float) -> None:
    async with asyncio.timeout(10):
        while await router.metric(sample) != value:  # noqa: ASYNC110 - from outside
            await asyncio.sleep(0.02)
