"""Real work on real processes moves every metric, and a real Prometheus finds data for each panel.

The failure guarded against: a metric that is exported and never updated, and a panel whose
expression matches nothing that a deployment exports, for a wrong label, say.
"""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import pytest

from deploy.observability.files import DASHBOARDS, RULES, render
from deploy.observability.grafana import Dashboard
from tests.integration.stack import Stack
from tests.observability.alerts import ALERTS
from tests.observability.busy_run import families, meet_trouble, open_stack, work
from tests.observability.prometheus import Prometheus, program, serve

pytestmark = [pytest.mark.ucx, pytest.mark.slow, pytest.mark.timeout(600)]

STILL = {
    "sluice_kv_checksum_failures": "no byte is damaged here: test_checksums.py damages one",
    "sluice_kv_quarantine_alarms": "needs a source that freezes: tests/chaos",
    "sluice_kv_double_releases": "counts a bug of ours: tests/blockmgr",
    "sluice_kv_storage_left_alone": "the storage answers: tests/transfer lets one hang",
    "sluice_kv_window_releases": "the model has no windows: test_windows.py",
    "sluice_kv_load_failures": "begins anew with its worker, which was replaced",
    "sluice_kv_transfer_failures": "begins anew with its worker, which was replaced",
    "sluice_kv_stale_rejects": "needs a race: tests/transfer",
    "sluice_kv_stale_epoch_rejects": "a part of those",
    "sluice_channel_rejects": "nobody knocks without a key: test_hostile_peers.py",
    "sluice_stale_messages": "needs a race: tests/router/test_server.py",
    "sluice_retries_exhausted": "every retry found a worker: tests/router/test_server.py",
    "sluice_kv_block_alloc_failures": "admission asks before it takes: tests/blockmgr",
}
"""What need not move in this run, and where it does."""
MOMENTARY = {
    "sluice_stage_requests": "nothing is in progress at its end",
    "sluice_running_requests": "",
    "sluice_waiting_requests": "",
    "sluice_queued_tokens": "",
    "sluice_kv_leases": "",
    "sluice_kv_transfers_in_flight": "",
    "sluice_kv_receiving_requests": "",
    "sluice_kv_block_withheld_oldest_seconds": "",
    "sluice_admission_reserve_blocks": "it decays",
    "vllm:num_requests_running": "",
    "vllm:num_requests_waiting": "",
    "vllm:kv_cache_usage_perc": "",
}
EXTERNAL = "NVIDIA's dcgm-exporter on the nodes"


class Run(NamedTuple):
    """A deployment that has worked, and who watched."""

    stack: Stack
    prometheus: Prometheus


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    program("prometheus")
    folder: Path = tmp_path_factory.mktemp("run")
    with open_stack(folder) as stack:
        asyncio.run(meet_trouble(stack))
        asyncio.run(work(stack, seed=1))
        stack.wait_ready()
        targets = {"router": [urlsplit(stack.url).netloc]}
        for worker in stack.workers():
            targets.setdefault(worker["role"], []).append(
                urlsplit(worker["metrics_address"]).netloc
            )
        with serve(folder, targets, rules=render()[RULES]) as prometheus:
            prometheus.wait_scraped(3)
            for seed in (100, 200):
                asyncio.run(work(stack, seed=seed))
            yield Run(stack, prometheus)


def test_every_metric_moves_in_a_busy_run_or_says_why_not(run: Run) -> None:
    exported = families(run.stack)
    moved = {
        name
        for (_, name), family in exported.items()
        if any(sample.value for sample in family.samples)
    }
    still = {name for _, name in exported} - moved
    assert sorted(still - set(STILL) - set(MOMENTARY)) == [], (
        "nothing updates these, and no reason is given"
    )
    unknown = (set(STILL) | set(MOMENTARY)) - {name for _, name in exported}
    assert not unknown, "these are not exported any more"


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda each: each.uid)
def test_every_panel_shows_data_of_a_busy_run(run: Run, dashboard: Dashboard) -> None:
    empty = [
        f"{panel.title}: {query.promql}"
        for panel in dashboard.panels
        if panel.needs != EXTERNAL
        for query in panel.queries
        if not run.prometheus.series(query.whole(), last_s=20)
    ]
    assert not empty, "\n".join(empty)


def test_each_side_of_every_alert_is_data_that_a_deployment_has(run: Run) -> None:
    found = run.prometheus.rules()
    assert {name for name, _ in found} == {alert.name for alert in ALERTS}
    assert {health for _, health in found} == {"ok"}
