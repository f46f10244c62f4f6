"""The dashboard that compares workers: which of them is the slow, the full or the busy one."""

from typing import Final

from deploy.observability.grafana import (
    DEPLOYMENT,
    OF_A_DEPLOYMENT,
    Dashboard,
    Panel,
    Query,
    Row,
    Variable,
    mean,
    rate,
)

VARIABLES: Final = (
    *OF_A_DEPLOYMENT,
    Variable("role", f"sluice_config_info{{{DEPLOYMENT}}}", "role"),
    Variable("worker", 'sluice_config_info{role=~"$role"}', "instance"),
)
_NAME: Final = "{{role}} {{instance}}"
_DCGM: Final = "NVIDIA's dcgm-exporter on the nodes"

LOAD: Final = Row(
    "Load",
    (
        Panel("Running", (Query("sluice_running_requests{@worker}", _NAME),)),
        Panel("Waiting", (Query("sluice_waiting_requests{@worker}", _NAME),)),
        Panel("Tokens still to be prefilled", (Query("sluice_queued_tokens{@worker}", _NAME),)),
    ),
)
STEPS: Final = Row(
    "Steps",
    (
        Panel(
            "Time of a step, mean",
            (
                Query(
                    mean("sluice_engine_step_seconds", "role", "instance", "kind", of="@worker"),
                    f"{_NAME} {{{{kind}}}}",
                ),
            ),
            "s",
        ),
        Panel(
            "Tokens in a step, mean",
            (Query(mean("sluice_batch_tokens", "role", "instance", of="@worker"), _NAME),),
        ),
        Panel(
            "Sequences in a step, mean",
            (Query(mean("sluice_batch_size", "role", "instance", of="@worker"), _NAME),),
        ),
        Panel(
            "Tokens sampled per second",
            (
                Query(
                    rate("sluice_generation_tokens_total", "role", "instance", of="@worker"), _NAME
                ),
            ),
        ),
        Panel(
            "Prompt tokens computed per second",
            (
                Query(
                    rate(
                        "sluice_prompt_tokens_total",
                        "role",
                        "instance",
                        of='@worker,source="computed"',
                    ),
                    _NAME,
                ),
            ),
        ),
        Panel(
            "Preemptions",
            (Query(rate("sluice_preemptions_total", "role", "instance", of="@worker"), _NAME),),
            "ops",
            needs="a pool too small for what runs",
        ),
    ),
)
MEMORY: Final = Row(
    "Memory",
    (
        Panel(
            "Share of blocks in use",
            (
                Query(
                    "1 - sum by (role, instance) "
                    '(sluice_kv_blocks{@worker,state=~"free|cached"}) / '
                    "sum by (role, instance) (sluice_kv_blocks{@worker})",
                    _NAME,
                ),
            ),
            "percentunit",
        ),
        Panel(
            "Share of blocks that wait for a reader",
            (
                Query(
                    'sum by (role, instance) (sluice_kv_blocks{@worker,state="leased"}) / '
                    "sum by (role, instance) (sluice_kv_blocks{@worker})",
                    _NAME,
                ),
            ),
            "percentunit",
        ),
        Panel(
            "Bytes that landed here",
            (
                Query(
                    rate(
                        "sluice_kv_transfer_bytes_total",
                        "instance",
                        of='@,instance=~"$worker"',
                    ),
                    "{{instance}}",
                ),
            ),
            "Bps",
        ),
        Panel(
            "What runs",
            (
                Query(
                    "sum by (role, instance, compat_hash, transport, kv_dtype, block_size, tp) "
                    "(sluice_config_info{@worker})",
                    f"{_NAME} {{{{kv_dtype}}}} x{{{{block_size}}}} tp {{{{tp}}}} {{{{transport}}}}",
                ),
            ),
        ),
    ),
)
MACHINE: Final = Row(
    "GPUs",
    (
        Panel(
            "Utilisation",
            (Query('DCGM_FI_DEV_GPU_UTIL{namespace=~"$namespace"}', "{{Hostname}} {{gpu}}"),),
            "percent",
            needs=_DCGM,
        ),
        Panel(
            "Memory",
            (Query('DCGM_FI_DEV_FB_USED{namespace=~"$namespace"}', "{{Hostname}} {{gpu}}"),),
            "decmbytes",
            needs=_DCGM,
        ),
        Panel(
            "NVLink",
            (
                Query('DCGM_FI_PROF_NVLINK_TX_BYTES{namespace=~"$namespace"}', "{{gpu}} out"),
                Query('DCGM_FI_PROF_NVLINK_RX_BYTES{namespace=~"$namespace"}', "{{gpu}} in"),
            ),
            "Bps",
            needs=_DCGM,
        ),
    ),
)
WORKERS: Final = Dashboard(
    uid="sluice-workers",
    title="Sluice / Workers",
    text="Each worker beside the others: which is slow, full or busy.",
    rows=(LOAD, STEPS, MEMORY, MACHINE),
    variables=VARIABLES,
)
