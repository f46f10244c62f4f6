"""The dashboard for whoever is paged: what users get, and which part of the way it depends on."""

from typing import Final

from deploy.observability.grafana import (
    OF_A_DEPLOYMENT,
    Dashboard,
    Panel,
    Query,
    Row,
    Variable,
    mean,
    quantiles,
    rate,
)

VARIABLES: Final = (
    *OF_A_DEPLOYMENT,
    Variable("model", "sluice_requests_total", "model"),
)
_GENERATIONS: Final = '@model,endpoint=~"/v1/(chat/)?completions"'

USERS: Final = Row(
    "What users get",
    (
        Panel(
            "Requests by status",
            (Query(rate("sluice_requests_total", "code", of=_GENERATIONS), "{{code}}"),),
            "reqps",
            "499: the client left. A stream that broke counts as what broke it, not as 200.",
            stacked=True,
        ),
        Panel(
            "Time to first token",
            quantiles("sluice_time_to_first_token_seconds", of="@model"),
            "s",
        ),
        Panel(
            "Time between tokens",
            quantiles("sluice_inter_token_latency_seconds", of="@model"),
            "s",
        ),
        Panel(
            "Whole requests",
            quantiles("sluice_request_duration_seconds", of=_GENERATIONS),
            "s",
        ),
        Panel(
            "In time",
            (
                Query(
                    "sum by (slo) (rate(sluice_slo_requests_total"
                    '{@model,met="true"}[$__rate_interval])) / '
                    + rate("sluice_slo_requests_total", "slo", of="@model"),
                    "{{slo}}",
                ),
            ),
            "percentunit",
            "Of all sequences that ended, failed ones included: within `router.slo_ttft_s`, "
            "`router.slo_itl_s`, and both.",
        ),
        Panel(
            "Tokens",
            (
                Query(rate("sluice_input_tokens_sum", of="@model"), "prompts"),
                Query(rate("sluice_output_tokens_sum", of="@model"), "outputs"),
                Query(rate("sluice_cached_tokens_sum", of="@model"), "prompts, cached"),
            ),
            "short",
            "Per second; counted when a sequence begins (prompts) and ends (outputs).",
        ),
    ),
)
ROUTER: Final = Row(
    "Router",
    (
        Panel(
            "Sequences by stage",
            (Query("sum by (stage) (sluice_stage_requests{@})", "{{stage}}"),),
            text="`route`: wait for a worker, the router's queue.",
            stacked=True,
        ),
        Panel(
            "Mean time in a stage",
            (Query(mean("sluice_stage_duration_seconds", "stage"), "{{stage}}"),),
            "s",
            "tokenize, route, generate: router; prefill, transfer, decode: workers.",
        ),
        Panel(
            "Where prompts are computed",
            (Query(rate("sluice_route_decisions_total", "path", "reason"), "{{path}} {{reason}}"),),
            "reqps",
            stacked=True,
        ),
        Panel(
            "Refused",
            (Query(rate("sluice_rejections_total", "reason"), "{{reason}}"),),
            "reqps",
            needs="a request that was refused",
        ),
        Panel(
            "Retried, and given up",
            (
                Query(rate("sluice_retries_total", "stage", "reason"), "{{stage}} {{reason}}"),
                Query(
                    rate("sluice_retries_exhausted_total", "stage", "reason"),
                    "given up: {{stage}} {{reason}}",
                ),
            ),
            "reqps",
            needs="an attempt that failed",
        ),
        Panel(
            "Cancelled",
            (Query(rate("sluice_cancellations_total", "cause"), "{{cause}}"),),
            "reqps",
            needs="a client that left, or a timeout",
        ),
        Panel(
            "Router's own work, mean",
            (Query(mean("sluice_router_overhead_seconds", "phase"), "{{phase}}"),),
            "s",
            "choose: picking the workers of an attempt; output: tokens to text.",
        ),
    ),
)
PREFILL: Final = Row(
    "Prefill",
    (
        Panel(
            "Waiting prompts, in seconds of work",
            (
                Query(
                    'sum (sluice_queued_tokens{@,role="prefill"}) / sum (rate('
                    'sluice_prompt_tokens_total{@,role="prefill",source="computed"}'
                    "[$__rate_interval]))",
                    "queued tokens / tokens per second",
                ),
            ),
            "s",
        ),
        Panel(
            "Time from arrival to the first token",
            (
                *quantiles("sluice_stage_duration_seconds", of='@,stage="prefill"'),
                Query(mean("sluice_stage_duration_seconds", of='@,stage="prefill"'), "mean"),
            ),
            "s",
            "On the worker that computes the prompt, waiting included.",
        ),
        Panel(
            "Tokens in a step",
            quantiles("sluice_batch_tokens", of='@,role="prefill"'),
        ),
        Panel(
            "Blocks that wait for their reader",
            (Query('sum (sluice_kv_blocks{@,role="prefill",state="leased"})', "leased"),),
            text="High: decode has no memory for finished prompts.",
        ),
        Panel(
            "Prompt tokens by where KV came from",
            (Query(rate("sluice_prompt_tokens_total", "role", "source"), "{{role}} {{source}}"),),
            stacked=True,
        ),
    ),
)
TRANSFER: Final = Row(
    "Transfer",
    (
        Panel("Time of a read", quantiles("sluice_kv_transfer_seconds"), "s"),
        Panel(
            "Bytes that landed",
            (Query(rate("sluice_kv_transfer_bytes_total", "transport"), "{{transport}}"),),
            "Bps",
        ),
        Panel(
            "KV that did not come",
            (
                Query(
                    rate("sluice_kv_transfer_failures_total", "stage", "reason"),
                    "{{stage}} {{reason}}",
                ),
            ),
            "reqps",
        ),
    ),
)
DECODE: Final = Row(
    "Decode",
    (
        Panel(
            "Requests",
            (
                Query('sum (sluice_running_requests{@,role="decode"})', "running"),
                Query('sum (sluice_waiting_requests{@,role="decode"})', "waiting"),
                Query("sum (sluice_kv_receiving_requests{@})", "receiving KV"),
            ),
        ),
        Panel(
            "Tokens per second",
            (Query(rate("sluice_generation_tokens_total", "role"), "{{role}}"),),
            text="Prefill samples the first token of a request.",
        ),
        Panel(
            "Preemptions",
            (Query(rate("sluice_preemptions_total", "role"), "{{role}}"),),
            "reqps",
            needs="a pool too small for what runs",
        ),
    ),
)
FLEET: Final = Row(
    "Fleet",
    (
        Panel(
            "Workers",
            (
                Query("max by (role, state) (sluice_workers{@})", "{{role}} {{state}}"),
                Query("max by (role) (sluice_workers_desired{@})", "{{role}} wanted"),
            ),
            text="As the router knows them; starting: not yet proven by a generation; wanted: by "
            "the config or `sluice scale`.",
        ),
        Panel(
            "Restarts in 10 minutes",
            (
                Query(
                    "sum by (role) (increase(sluice_worker_restarts_total{@}[10m]))",
                    "{{role}}",
                ),
            ),
            text="New processes in the place of earlier ones.",
        ),
        Panel(
            "Silence of the controller",
            (Query("min(sluice_controller_silence_seconds{@})", "since it was heard"),),
            "s",
            text="It speaks to every service each second; while it is silent, nobody who dies is "
            "started anew.",
        ),
        Panel(
            "Kinds of KV",
            (
                Query(
                    "count by (role, compat_hash, transport) (sluice_config_info{@})",
                    "{{role}} {{compat_hash}} {{transport}}",
                ),
            ),
            text="Workers of one `compat_hash` exchange KV; two of them: a rollout, or a mistake.",
        ),
    ),
)
OVERVIEW: Final = Dashboard(
    uid="sluice-overview",
    title="Sluice / Overview",
    text="What users get, and which part of the way from router to decode it depends on.",
    rows=(USERS, ROUTER, PREFILL, TRANSFER, DECODE, FLEET),
    variables=VARIABLES,
)
