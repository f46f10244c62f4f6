"""What somebody is called for, as Prometheus' alert rules.

Each rule sums over the processes of one deployment, and keeps the labels by which a scrape tells
deployments apart; where there is one only, they are absent and nothing changes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

RUNBOOKS: Final = "docs/operations.md"
"""Where the runbooks are: a path of this repository, unless whoever writes the files has a URL."""
OF: Final = "namespace, release"
"""What tells deployments apart."""
Severity = Literal["critical", "warning", "info"]


@dataclass(frozen=True, slots=True)
class Alert:
    """One rule. Its runbook is the section of ``docs/operations.md`` that has its name."""

    name: str
    severity: Severity
    expr: str
    for_: str
    summary: str
    description: str

    def to_rule(self, runbooks: str) -> Mapping[str, Any]:
        """Return the rule as Prometheus reads it."""
        return {
            "alert": self.name,
            "expr": self.expr,
            "for": self.for_,
            "labels": {"severity": self.severity},
            "annotations": {
                "summary": self.summary,
                "description": self.description,
                "runbook_url": f"{runbooks}#{self.name.lower()}",
            },
        }


def _per_s(metric: str, labels: str = "", *, window: str = "5m", by: str = OF) -> str:
    selector = f"{{{labels}}}" if labels else ""
    return f"sum by ({by}) (rate({metric}{selector}[{window}]))"


def _grown(metric: str, labels: str = "", *, window: str = "10m", by: str = OF) -> str:
    selector = f"{{{labels}}}" if labels else ""
    return f"sum by ({by}) (increase({metric}{selector}[{window}])) > 0"


_GENERATIONS: Final = 'endpoint=~"/v1/(chat/)?completions"'
_ROUTER_SEEN: Final = (
    f"(count by ({OF}) (count_over_time(sluice_workers[1h])) or "
    f"(count by ({OF}) (count_over_time(sluice_workers[1d])) "
    f"and on ({OF}) count by ({OF}) (sluice_config_info)))"
)
"""Releases whose router was scraped within the hour, or the day where workers still are: a release
that is gone is soon forgotten, an outage is not."""

USERS: Final = (
    Alert(
        "SluiceTimeToFirstTokenHigh",
        "warning",
        "histogram_quantile(0.99, "
        + _per_s("sluice_time_to_first_token_seconds_bucket", by=f"{OF}, le")
        + f') > on ({OF}) max by ({OF}) (sluice_slo_seconds{{slo="ttft"}})',
        "10m",
        "One in a hundred requests waits longer than router.slo_ttft_s for its first token",
        "p99 of the time to the first token is {{ $value | humanizeDuration }}.",
    ),
    Alert(
        "SluiceGoodputLow",
        "warning",
        _per_s("sluice_slo_requests_total", 'slo="both",met="true"')
        + " / "
        + _per_s("sluice_slo_requests_total", 'slo="both"')
        + " < 0.95",
        "10m",
        "Fewer than 95 % of the sequences are in time",
        "{{ $value | humanizePercentage }} were within both router.slo_ttft_s and "
        "router.slo_itl_s.",
    ),
    Alert(
        "SluiceRequestsFail",
        "critical",
        _per_s("sluice_requests_total", f'{_GENERATIONS},code=~"5.."')
        + " / "
        + _per_s("sluice_requests_total", _GENERATIONS)
        + " > 0.01",
        "5m",
        "More than 1 % of the requests fail",
        "{{ $value | humanizePercentage }} of the requests ended with a 5xx, or broke.",
    ),
    Alert(
        "SluiceRequestsRefused",
        "warning",
        f'sum by ({OF}, reason) (rate(sluice_rejections_total{{reason=~"queue_full|no_worker"}}'
        "[5m])) > 0",
        "5m",
        "Requests are refused: {{ $labels.reason }}",
        "{{ $value | humanize }} requests per second are answered with 503 before a worker saw "
        "them.",
    ),
    Alert(
        "SluiceRetriesExhausted",
        "warning",
        _grown("sluice_retries_exhausted_total", by=f"{OF}, stage, reason"),
        "0m",
        "Requests failed after their last attempt: {{ $labels.stage }}, {{ $labels.reason }}",
        "{{ $value | humanize }} in 10 minutes.",
    ),
)
FLEET: Final = (
    Alert(
        "SluiceNoReadyDecode",
        "critical",
        f'max by ({OF}) (sluice_workers{{role="decode",state="ready"}}) == 0',
        "1m",
        "No decode worker is ready: nothing is served",
        "The routers know no decode worker that has proven itself by a generation.",
    ),
    Alert(
        "SluiceNoReadyPrefill",
        "warning",
        # Silent where none is wanted: that deployment runs without.
        f'max by ({OF}) (sluice_workers{{role="prefill",state="ready"}}) == 0 and on ({OF}) '
        f'max by ({OF}) (sluice_workers_desired{{role="prefill"}}) > 0',
        "2m",
        "No prefill worker is ready: decode workers compute all prompts",
        "Requests are served, with time between tokens as on a server without two fleets.",
    ),
    Alert(
        "SluiceWorkersMissing",
        "warning",
        # Silent where none is ready: the two alerts above tell of that.
        f"max by ({OF}, role) (sluice_workers_desired) - on ({OF}, role) "
        f'(max by ({OF}, role) (sluice_workers{{state="ready"}}) > 0) > 0',
        "15m",
        "Fewer {{ $labels.role }} workers are ready than are wanted",
        "{{ $value }} of them are missing; the others do their work.",
    ),
    Alert(
        "SluiceWorkersRestart",
        "warning",
        f"max by ({OF}, role) (increase(sluice_worker_restarts_total[30m])) > 4",
        "0m",
        "{{ $labels.role }} workers start again and again",
        "{{ $value | humanize }} new processes in the place of earlier ones in 30 minutes.",
    ),
    Alert(
        "SluiceControllerSilent",
        "warning",
        f"min by ({OF}) (sluice_controller_silence_seconds) > 60",
        "5m",
        "Nobody supervises: the controller is silent",
        "It has told no worker anything for {{ $value | humanizeDuration }}. Requests go on; no "
        "worker that dies is started anew.",
    ),
    Alert(
        "SluiceCompatibilityMixed",
        "warning",
        f"count by ({OF}) (count by ({OF}, compat_hash) (sluice_config_info)) > 1",
        "15m",
        "Workers of different kinds run beside each other",
        "{{ $value }} values of compat_hash: workers of different ones exchange no KV.",
    ),
    Alert(
        "SluiceMetricsMissing",
        "warning",
        f"(max by ({OF}, role) (sum by ({OF}, role, instance) (sluice_workers)) > 0) "
        f"unless on ({OF}, role) count by ({OF}, role) (sluice_config_info)",
        "10m",
        "No {{ $labels.role }} worker is scraped",
        "The routers know {{ $value }} of them; dashboards and alerts are blind for them.",
    ),
    Alert(
        "SluiceRouterMissing",
        "critical",
        _ROUTER_SEEN + f" unless on ({OF}) count by ({OF}) (sluice_workers)",
        "5m",
        "No router is scraped any more",
        "Either none runs, or Prometheus does not reach its /metrics.",
    ),
    Alert(
        "SluiceStrangers",
        "info",
        _grown("sluice_channel_rejects_total", 'reason="key"'),
        "0m",
        "Somebody without an admitted key tries to connect",
        "{{ $value | humanize }} connections to a control port were refused in 10 minutes.",
    ),
)
QUEUES: Final = (
    Alert(
        "SluicePrefillQueueLong",
        "warning",
        f'sum by ({OF}) (sluice_queued_tokens{{role="prefill"}}) / '
        + _per_s("sluice_prompt_tokens_total", 'role="prefill",source="computed"')
        + " > 5",
        "5m",
        "Prompts wait longer than 5 s for prefill",
        "What is queued is {{ $value | humanizeDuration }} of work at the present speed.",
    ),
    Alert(
        "SluiceBlocksLeased",
        "warning",
        f'sum by ({OF}) (sluice_kv_blocks{{role="prefill",state="leased"}}) / '
        f'sum by ({OF}) (sluice_kv_blocks{{role="prefill"}}) > 0.3',
        "10m",
        "Finished prompts hold more than 30 % of prefill's blocks",
        "{{ $value | humanizePercentage }} of the blocks wait for a decode worker to read them.",
    ),
    Alert(
        "SluicePreemptions",
        "info",
        f"sum by ({OF}, role) (rate(sluice_preemptions_total[10m])) > 0.1",
        "10m",
        "Sequences give their blocks up and are computed again",
        "{{ $value | humanize }} per second on {{ $labels.role }}.",
    ),
)
TRANSFER: Final = (
    Alert(
        "SluiceTransfersFail",
        "warning",
        _per_s("sluice_kv_transfer_failures_total")
        + " / ("
        + _per_s("sluice_kv_transfer_failures_total")
        + " + "
        + _per_s("sluice_stage_duration_seconds_count", 'stage="transfer"')
        + ") > 0.005",
        "5m",
        "KV of more than 0.5 % of the requests does not come",
        "{{ $value | humanizePercentage }}; they are computed anew on decode, or retried.",
    ),
    Alert(
        "SluiceTransferSlow",
        "warning",
        _per_s("sluice_kv_transfer_size_bytes_sum")
        + " / "
        + _per_s("sluice_kv_transfer_seconds_sum")
        + " < 1e9 and "
        + _per_s("sluice_kv_transfer_bytes_total")
        + " > 1e6",
        "15m",
        "KV travels slower than 1 GB/s",
        "A read brings {{ $value | humanize }}B/s, as over TCP; RDMA and shared memory do more.",
    ),
    Alert(
        "SluiceLeasesExpire",
        "warning",
        _grown("sluice_kv_lease_events_total", 'role="prefill",event="expired"'),
        "0m",
        "A reader of KV went away or was cut off",
        "{{ $value | humanize }} leases ended by time in 10 minutes.",
    ),
    Alert(
        "SluiceQuarantineAlarm",
        "critical",
        _grown("sluice_kv_quarantine_alarms_total"),
        "0m",
        "Too many blocks waited for reads that did not end",
        "A decode worker tore {{ $value | humanize }} endpoints down to get its memory back.",
    ),
    Alert(
        "SluiceKVDamaged",
        "critical",
        _grown("sluice_kv_checksum_failures_total"),
        "0m",
        "KV arrived that was not what was sent",
        "{{ $value | humanize }} reads in 10 minutes; none was used.",
    ),
    Alert(
        "SluiceStorageLeftAlone",
        "warning",
        f"max by ({OF}, role) (sluice_kv_storage_left_alone) > 0",
        "5m",
        "The storage tier does not answer",
        "{{ $labels.role }} workers serve without it.",
    ),
)
GROUPS: Final[Mapping[str, Sequence[Alert]]] = {
    "sluice-users": USERS,
    "sluice-fleet": FLEET,
    "sluice-queues": QUEUES,
    "sluice-transfer": TRANSFER,
}


def rules(*, runbooks: str = RUNBOOKS) -> Mapping[str, Any]:
    """Return the rule file, which is also the ``spec`` of a ``PrometheusRule``."""
    return {
        "groups": [
            {"name": name, "rules": [alert.to_rule(runbooks) for alert in alerts]}
            for name, alerts in GROUPS.items()
        ]
    }
