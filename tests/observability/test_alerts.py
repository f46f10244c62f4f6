"""Each alert fires on the trouble that it is for, and not while all is well.

Prometheus' own ``promtool test rules`` judges: a series of samples, one per minute, goes in, and
the alerts at a minute come out. Each alert has a sample of its trouble and one of health.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.observability.alerts import Alert
from deploy.observability.files import RULES, render
from tests.observability.alerts import ALERTS
from tests.observability.prometheus import promtool

ROOT = Path(__file__).parents[2]
DECODE_READY = 'sluice_workers{role="decode",state="ready",instance="r"}'
PREFILL_READY = 'sluice_workers{role="prefill",state="ready",instance="r"}'
DECODE_DESIRED = 'sluice_workers_desired{role="decode",instance="r"}'
PREFILL_DESIRED = 'sluice_workers_desired{role="prefill",instance="r"}'
HEALTHY = {
    DECODE_READY: "2x60",
    PREFILL_READY: "1x60",
    DECODE_DESIRED: "2x60",
    PREFILL_DESIRED: "1x60",
    'sluice_config_info{role="prefill",compat_hash="a",instance="p0"}': "1x60",
    'sluice_config_info{role="decode",compat_hash="a",instance="d0"}': "1x60",
    'sluice_time_to_first_token_seconds_bucket{le="0.5"}': "0+60x60",
    'sluice_time_to_first_token_seconds_bucket{le="5"}': "0+60x60",
    'sluice_time_to_first_token_seconds_bucket{le="+Inf"}': "0+60x60",
    'sluice_slo_seconds{slo="ttft"}': "2x60",
    'sluice_slo_requests_total{slo="both",met="true"}': "0+99x60",
    'sluice_slo_requests_total{slo="both",met="false"}': "0+1x60",
    'sluice_requests_total{endpoint="/v1/completions",code="200"}': "0+600x60",
    'sluice_requests_total{endpoint="/v1/completions",code="400"}': "0+90x60",
    'sluice_requests_total{endpoint="/ready",code="503"}': "0+600x60",
    'sluice_requests_total{endpoint="/v1/completions",code="500"}': "0x60",
    'sluice_rejections_total{reason="queue_full"}': "0x60",
    'sluice_rejections_total{reason="too_long"}': "0+10x60",
    'sluice_retries_exhausted_total{stage="decode",reason="worker_lost"}': "0x60",
    'sluice_worker_restarts_total{role="decode"}': "0 1x59",
    'sluice_controller_silence_seconds{instance="r"}': "1x60",
    'sluice_channel_rejects_total{reason="key"}': "0x60",
    'sluice_channel_rejects_total{reason="handshake"}': "0+1x60",
    'sluice_queued_tokens{role="prefill"}': "100x60",
    'sluice_prompt_tokens_total{role="prefill",source="computed"}': "0+6000x60",
    'sluice_kv_blocks{role="prefill",state="leased"}': "10x60",
    'sluice_kv_blocks{role="prefill",state="free"}': "90x60",
    'sluice_preemptions_total{role="decode"}': "0 1 1x58",
    'sluice_kv_transfer_failures_total{role="decode",stage="data",reason="peer_lost"}': "0x60",
    'sluice_stage_duration_seconds_count{stage="transfer"}': "0+600x60",
    "sluice_kv_transfer_size_bytes_sum": "0+60000000000x60",
    'sluice_kv_transfer_bytes_total{transport="ucx"}': "0+60000000000x60",
    "sluice_kv_transfer_seconds_sum": "0+20x60",
    'sluice_kv_lease_events_total{role="prefill",event="expired"}': "0x60",
    'sluice_kv_lease_events_total{role="prefill",event="released"}': "0+9x60",
    'sluice_kv_quarantine_alarms_total{role="decode"}': "0x60",
    'sluice_kv_checksum_failures_total{role="decode"}': "0x60",
    'sluice_kv_storage_left_alone{role="prefill"}': "0x60",
}
"""A deployment on which nothing is wrong, for an hour."""
AT = "40m"


@dataclass(frozen=True)
class Trouble:
    """What differs from health; None: the series is not there."""

    changes: dict[str, str | None]


TROUBLES = {
    "SluiceTimeToFirstTokenHigh": Trouble(
        {'sluice_time_to_first_token_seconds_bucket{le="0.5"}': "0+30x60"}
    ),
    "SluiceGoodputLow": Trouble(
        {'sluice_slo_requests_total{slo="both",met="false"}': "0+20x60"},
    ),
    "SluiceRequestsFail": Trouble(
        {'sluice_requests_total{endpoint="/v1/completions",code="500"}': "0+12x60"}
    ),
    "SluiceRequestsRefused": Trouble({'sluice_rejections_total{reason="queue_full"}': "0+6x60"}),
    "SluiceRetriesExhausted": Trouble(
        {'sluice_retries_exhausted_total{stage="decode",reason="worker_lost"}': "0x34 1x26"}
    ),
    "SluiceNoReadyDecode": Trouble({DECODE_READY: "2x30 0x30"}),
    "SluiceNoReadyPrefill": Trouble({PREFILL_READY: "1x30 0x30"}),
    "SluiceWorkersMissing": Trouble({DECODE_DESIRED: "2x20 3x40"}),
    "SluiceWorkersRestart": Trouble({'sluice_worker_restarts_total{role="decode"}': "0+0.2x60"}),
    "SluiceControllerSilent": Trouble(
        {'sluice_controller_silence_seconds{instance="r"}': "1x30 60+60x30"}
    ),
    "SluiceCompatibilityMixed": Trouble(
        {'sluice_config_info{role="decode",compat_hash="b",instance="d1"}': "1x60"}
    ),
    "SluiceMetricsMissing": Trouble(
        {'sluice_config_info{role="prefill",compat_hash="a",instance="p0"}': None}
    ),
    "SluiceRouterMissing": Trouble(
        {
            DECODE_READY: "2x25",
            PREFILL_READY: "1x25",
            DECODE_DESIRED: "2x25",
            PREFILL_DESIRED: "1x25",
        }
    ),
    "SluiceStrangers": Trouble({'sluice_channel_rejects_total{reason="key"}': "0x34 1x26"}),
    "SluicePrefillQueueLong": Trouble({'sluice_queued_tokens{role="prefill"}': "900x60"}),
    "SluiceBlocksLeased": Trouble({'sluice_kv_blocks{role="prefill",state="leased"}': "60x60"}),
    "SluicePreemptions": Trouble({'sluice_preemptions_total{role="decode"}': "0+30x60"}),
    "SluiceTransfersFail": Trouble(
        {
            'sluice_kv_transfer_failures_total{role="decode",stage="data",reason="peer_lost"}': (
                "0+6x60"
            )
        }
    ),
    "SluiceTransferSlow": Trouble({"sluice_kv_transfer_seconds_sum": "0+120x60"}),
    "SluiceLeasesExpire": Trouble(
        {'sluice_kv_lease_events_total{role="prefill",event="expired"}': "0x34 2x26"}
    ),
    "SluiceQuarantineAlarm": Trouble(
        {'sluice_kv_quarantine_alarms_total{role="decode"}': "0x34 1x26"}
    ),
    "SluiceKVDamaged": Trouble({'sluice_kv_checksum_failures_total{role="decode"}': "0x34 1x26"}),
    "SluiceStorageLeftAlone": Trouble({'sluice_kv_storage_left_alone{role="prefill"}': "1x60"}),
}


def samples(changes: dict[str, str | None], *, labels: str = "") -> list[dict[str, str]]:
    """Return a healthy deployment's series with ``changes``, each with ``labels`` added."""
    merged = {series: values for series, values in (HEALTHY | changes).items() if values}
    return [
        {"series": _with(series, labels), "values": values} for series, values in merged.items()
    ]


def _with(series: str, labels: str) -> str:
    name, _, rest = series.partition("{")
    inner = ",".join(filter(None, (rest.removesuffix("}"), labels)))
    return f"{name}{{{inner}}}"


def firing(tmp_path: Path, series: list[dict[str, str]], *, at: str = AT) -> set[tuple[str, str]]:
    """Return alerts and releases that fire on ``series`` at ``at``, by promtool's own account."""
    (tmp_path / "rules.yaml").write_text(render()[RULES])
    # An alert's series is itself a metric, so one query tells all that fire.
    test: dict[str, Any] = {
        "rule_files": ["rules.yaml"],
        "evaluation_interval": "1m",
        "tests": [
            {
                "interval": "1m",
                "input_series": series,
                "promql_expr_test": [
                    {
                        "expr": 'count by (alertname, release) (ALERTS{alertstate="firing"})',
                        "eval_time": at,
                        "exp_samples": [{"labels": 'never{alertname="none"}', "value": -1}],
                    }
                ],
            }
        ],
    }
    (tmp_path / "test.yaml").write_text(yaml.safe_dump(test))
    with pytest.raises(AssertionError) as told:
        promtool("test", "rules", tmp_path / "test.yaml")
    got = str(told.value).partition("got:")[2]
    found = re.findall(r'\{alertname="(\w+)"(?:, release="([\w-]+)")?\}', got)
    return {(name, release) for name, release in found}


def test_every_alert_has_a_trouble() -> None:
    assert set(TROUBLES) == {alert.name for alert in ALERTS}


def test_promtool_takes_the_rules(tmp_path: Path) -> None:
    (tmp_path / "rules.yaml").write_text(render()[RULES])
    assert f"{len(ALERTS)} rules found" in promtool("check", "rules", tmp_path / "rules.yaml")


@pytest.mark.parametrize("labels", ["", 'namespace="prod",release="a"'])
def test_nothing_fires_while_all_is_well(tmp_path: Path, labels: str) -> None:
    assert firing(tmp_path, samples({}, labels=labels)) == set()


@pytest.mark.parametrize("alert", ALERTS, ids=lambda each: each.name)
def test_an_alert_fires_on_its_trouble_and_no_other_does(tmp_path: Path, alert: Alert) -> None:
    found = firing(tmp_path, samples(TROUBLES[alert.name].changes))
    assert {name for name, _ in found} == {alert.name}


@pytest.mark.parametrize("alert", ALERTS, ids=lambda each: each.name)
def test_an_alert_fires_for_the_release_in_trouble_alone(tmp_path: Path, alert: Alert) -> None:
    sick = samples(TROUBLES[alert.name].changes, labels='namespace="prod",release="sick"')
    well = samples({}, labels='namespace="prod",release="well"')
    assert firing(tmp_path, sick + well) == {(alert.name, "sick")}


@pytest.mark.parametrize("has_workers", [True, False])
def test_a_lost_router_is_not_forgotten_while_its_workers_are_scraped(
    tmp_path: Path, *, has_workers: bool
) -> None:
    # Given a router that was last scraped four hours ago
    series = samples(
        {
            DECODE_READY: "2x60",
            PREFILL_READY: "1x60",
            'sluice_config_info{role="decode",compat_hash="a",instance="d0"}': (
                "1x600" if has_workers else None
            ),
        },
        labels='namespace="prod",release="a"',
    )
    found = firing(tmp_path, series, at="300m")
    assert found == ({("SluiceRouterMissing", "a")} if has_workers else set())


def test_a_router_that_was_never_scraped_is_not_missed(tmp_path: Path) -> None:
    unknown = dict.fromkeys((DECODE_READY, PREFILL_READY, DECODE_DESIRED, PREFILL_DESIRED))
    assert firing(tmp_path, samples(unknown)) == set()


@pytest.mark.parametrize(
    ("ready", "desired"), [("0x60", "0x60"), ("1x37 0x20", "1x36 0x20")], ids=["never", "any more"]
)
def test_a_deployment_that_wants_no_prefill_workers_is_silent(
    tmp_path: Path, ready: str, desired: str
) -> None:
    without = samples(
        {PREFILL_READY: ready, PREFILL_DESIRED: desired},
        labels='namespace="prod",release="without"',
    )
    well = samples({}, labels='namespace="prod",release="well"')
    assert firing(tmp_path, without + well) == set()


@pytest.mark.parametrize(
    "silence",
    ["NaNx60", "1x30 60+60x4 1x30", "61+60x60"],
    ids=["nobody was ever told", "it is back", "the other router hears it"],
)
def test_a_controller_that_is_silent_for_no_reason_to_call_is_not_told_of(
    tmp_path: Path, silence: str
) -> None:
    silent = {'sluice_controller_silence_seconds{instance="r"}': silence}
    if silence.startswith("61"):
        silent['sluice_controller_silence_seconds{instance="s"}'] = "1x60"
    assert firing(tmp_path, samples(dict(silent))) == set()


def test_workers_are_missing_for_a_while_before_anybody_is_called(tmp_path: Path) -> None:
    assert firing(tmp_path, samples({DECODE_DESIRED: "2x26 3x40"})) == set()


def test_a_router_that_knows_fewer_workers_than_its_neighbour_misses_none(tmp_path: Path) -> None:
    neighbour = {
        DECODE_READY.replace('"r"', '"s"'): "1x60",
        DECODE_DESIRED.replace('"r"', '"s"'): "2x60",
    }
    assert firing(tmp_path, samples(dict(neighbour))) == set()


def test_prefill_workers_that_never_become_ready_are_told_of_once(tmp_path: Path) -> None:
    found = firing(tmp_path, samples({PREFILL_READY: "0x60"}))
    assert found == {("SluiceNoReadyPrefill", "")}


def test_every_alert_has_its_runbook_and_every_runbook_its_alert() -> None:
    page = (ROOT / "docs" / "operations.md").read_text()
    sections = set(re.findall(r"^### (Sluice\w+)$", page, re.MULTILINE))
    assert sections == {alert.name for alert in ALERTS}


def test_a_rule_names_the_page_and_the_section_of_its_runbook() -> None:
    text = render(runbooks="https://example.org/operations")[RULES]
    for alert in ALERTS:
        assert f"https://example.org/operations#{alert.name.lower()}\n" in text
