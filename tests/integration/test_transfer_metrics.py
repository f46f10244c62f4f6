"""After real transfers every metric of transfers has moved, or is one that tells of trouble.

The failure guarded against: a metric that a dashboard shows and that nothing ever updates, and
an alert on a fallback to TCP that could never fire.
"""

import asyncio
import re
import signal
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from core.config import TransferConfig
from tests.integration.models import VOCAB_SIZE, tiny_model
from tests.integration.requests import complete, prompt_of
from tests.integration.stack import Stack

pytestmark = [pytest.mark.ucx, pytest.mark.timeout(300)]

LONG = 200
TROUBLE = {
    "sluice_kv_stale_rejects_total",
    "sluice_kv_stale_epoch_rejects_total",
    "sluice_kv_transfer_failures_total",
    "sluice_kv_checksum_failures_total",
    "sluice_kv_quarantine_alarms_total",
}
"""Zero where all is well."""
MOMENTARY = {
    "decode": {"sluice_kv_transfers_in_flight", "sluice_kv_receiving_requests"},
    "prefill": {"sluice_kv_leases"},
}
"""Of what is in progress, and nothing is."""
MOVED = {
    "decode": {
        "sluice_kv_transfer_seconds_count",
        "sluice_kv_transfer_post_seconds_count",
        "sluice_kv_transfer_post_seconds_sum",
        "sluice_kv_transfer_size_bytes_count",
        "sluice_kv_transfer_bytes_total",
        "sluice_kv_transfer_descriptors_count",
        "sluice_kv_handshake_seconds_count",
        "sluice_kv_connections",
        "sluice_kv_path_peers",
        "sluice_kv_reads_total",
        "sluice_kv_lease_events_total",
        "sluice_kv_registered_bytes",
    },
    "prefill": {
        "sluice_kv_connections",
        "sluice_kv_lease_events_total",
        "sluice_kv_registered_bytes",
    },
}


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with Stack.open(
        tiny_model("llama", tmp_path_factory.mktemp("models")),
        model={"dtype": "float32"},
        cache={"memory_gib": 0.02, "block_size": 16},
        router={"local_prefill_max_tokens": 64},
    ) as stack:
        yield stack


def ask(stack: Stack, *, seed: int) -> dict[str, Any]:
    async def once() -> dict[str, Any]:
        async with httpx.AsyncClient(base_url=stack.url, timeout=60) as client:
            prompt = prompt_of(LONG, VOCAB_SIZE, seed=seed)
            return await complete(client, prompt, max_tokens=2, ignore_eos=True)

    return asyncio.run(once())


def total(metrics: dict[str, float], name: str, **labels: str) -> float:
    """Return the sum over the samples of ``name`` that have ``labels``."""
    wanted = {f'{label}="{value}"' for label, value in labels.items()}
    return sum(
        value
        for sample, value in metrics.items()
        if sample.partition("{")[0] == name and wanted <= set(re.findall(r'\w+="[^"]*"', sample))
    )


@pytest.mark.parametrize("role", ["decode", "prefill"])
def test_every_metric_of_transfers_moves_with_a_real_one(stack: Stack, role: str) -> None:
    answer = ask(stack, seed=1 if role == "decode" else 2)
    assert answer["sluice"]["path"] == "disaggregated"

    metrics = stack.metrics(f"{role}-0")

    still = {name for name in MOVED[role] if not total(metrics, name)}
    assert not still, f"nothing updates {still}"
    exported = {sample.partition("{")[0] for sample in metrics}
    families = {name for name in exported if name.startswith("sluice_kv_transfer")} | {
        name for name in exported if re.match(r"sluice_kv_(stale|reads|lease|conn|path|hand)", name)
    }
    parts = re.compile(r"_(bucket|sum|count|created)$")
    known = {parts.sub("", name) for name in MOVED[role] | TROUBLE | MOMENTARY[role]}
    unknown = {parts.sub("", name) for name in families} - known
    assert not unknown, f"say in this test what moves {unknown}"


def test_decode_has_registered_the_room_beside_the_pool_too(stack: Stack) -> None:
    nbytes = {
        role: total(stack.metrics(f"{role}-0"), "sluice_kv_registered_bytes")
        for role in ("decode", "prefill")
    }
    assert nbytes["decode"] - nbytes["prefill"] == TransferConfig().staging_mib * 2**20


def test_the_bytes_that_moved_and_their_transport_are_the_real_ones(stack: Stack) -> None:
    before = stack.metrics("decode-0")
    answer = ask(stack, seed=3)
    after = stack.metrics("decode-0")
    (transport,) = {
        label
        for sample in after
        for label in re.findall(r'kv_transfer_bytes.*transport="(\w+)"', sample)
    }
    assert answer["sluice"]["transport"] == transport != "auto"
    moved = total(after, "sluice_kv_transfer_bytes_total") - total(
        before, "sluice_kv_transfer_bytes_total"
    )
    assert moved == answer["sluice"]["kv_nbytes"] > 0


def test_config_info_tells_what_alerts_compare(stack: Stack) -> None:
    infos = []
    for name in ("decode-0", "prefill-0"):
        metrics = stack.metrics(name)
        assert total(metrics, "sluice_build_info") == 1
        (sample,) = [sample for sample in metrics if sample.startswith("sluice_config_info")]
        infos.append(dict(re.findall(r'(\w+)="([^"]*)"', sample)))
    decode, prefill = infos
    assert (decode.pop("role"), prefill.pop("role")) == ("decode", "prefill")
    assert decode == prefill
    assert decode.keys() >= {"compat_hash", "kv_dtype", "block_size", "tp", "transport"}
    assert (decode["block_size"], decode["tp"]) == ("16", "1")


def test_a_lost_prefill_worker_is_counted_as_one(stack: Stack) -> None:
    ask(stack, seed=4)
    stack.kill("prefill-0", signal_number=signal.SIGSTOP)
    assert ask(stack, seed=5)["choices"]  # computed elsewhere, once the silence is noticed
    metrics = stack.metrics("decode-0")
    name = "sluice_kv_transfer_failures_total"
    assert total(metrics, name, stage="data", reason="peer_lost") == 1
    assert total(metrics, name) == 1
    assert total(metrics, "sluice_kv_path_peers") == 0
    assert total(metrics, "sluice_kv_connections") == 0
