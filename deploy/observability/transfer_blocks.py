"""The dashboard of KV: how it travels, where it lies, and what holds it."""

from typing import Final

from deploy.observability.grafana import (
    OF_A_DEPLOYMENT,
    Dashboard,
    Panel,
    Query,
    Row,
    mean,
    quantiles,
    rate,
)

_TIERS: Final = "`cache.host_tier_gib`"

READS: Final = Row(
    "Reads",
    (
        Panel("Time of a read", quantiles("sluice_kv_transfer_seconds"), "s"),
        Panel(
            "Speed of a read",
            (
                Query(
                    f"{rate('sluice_kv_transfer_size_bytes_sum')} / "
                    f"{rate('sluice_kv_transfer_seconds_sum')}",
                    "bytes / time of reads",
                ),
            ),
            "Bps",
            "Waiting for its turn included. Below 1 GB/s: TCP, or a link that many share.",
        ),
        Panel(
            "Bytes that landed",
            (
                Query(
                    rate("sluice_kv_transfer_bytes_total", "transport", "direction"),
                    "{{transport}} {{direction}}",
                ),
            ),
            "Bps",
        ),
        Panel("Bytes of a read", quantiles("sluice_kv_transfer_size_bytes"), "bytes"),
        Panel("Descriptors of a read", quantiles("sluice_kv_transfer_descriptors")),
        Panel(
            "Posting a part of a read",
            quantiles("sluice_kv_transfer_post_seconds"),
            "s",
            "Time of the decode worker's event loop. Over shared memory it is the copy itself.",
        ),
        Panel(
            "In flight",
            (
                Query("sum by (peer_role) (sluice_kv_transfers_in_flight{@})", "reads"),
                Query("sum (sluice_kv_receiving_requests{@})", "requests that receive"),
            ),
        ),
        Panel(
            "Reads by what became of them",
            (Query(rate("sluice_kv_reads_total", "event"), "{{event}}"),),
            "ops",
        ),
        Panel(
            "KV that did not come",
            (
                Query(
                    rate("sluice_kv_transfer_failures_total", "stage", "reason"),
                    "{{stage}} {{reason}}",
                ),
                Query(rate("sluice_kv_load_failures_total", "policy"), "then: {{policy}}"),
            ),
            "reqps",
        ),
    ),
)
PAIRS: Final = Row(
    "Pairs and leases",
    (
        Panel(
            "Pairs by path",
            (Query("sum by (path) (sluice_kv_path_peers{@})", "{{path}}"),),
            stacked=True,
        ),
        Panel(
            "Connections",
            (
                Query(
                    "sum by (role, state) (sluice_kv_connections{@})",
                    "{{role}} {{state}}",
                ),
            ),
        ),
        Panel(
            "Time to pair, mean",
            (
                Query(
                    "sum (sluice_kv_handshake_seconds_sum{@}) / "
                    "sum (sluice_kv_handshake_seconds_count{@})",
                    "since the start",
                ),
            ),
            "s",
        ),
        Panel(
            "Leases",
            (Query("sum (sluice_kv_leases{@})", "now"),),
        ),
        Panel(
            "Leases by what happened",
            (Query(rate("sluice_kv_lease_events_total", "role", "event"), "{{role}} {{event}}"),),
            "ops",
            "expired: the reader went away or was cut off.",
        ),
        Panel(
            "Dropped, as it must be",
            (
                Query(rate("sluice_kv_stale_rejects_total", "role", "kind"), "{{role}} {{kind}}"),
                Query(rate("sluice_stale_messages_total", "message"), "router {{message}}"),
                Query(rate("sluice_channel_rejects_total", "reason"), "channel: {{reason}}"),
            ),
            "ops",
            "Messages of attempts and processes that are over, and strangers.",
        ),
        Panel(
            "Trouble since the start",
            (
                Query("sum (sluice_kv_checksum_failures_total{@})", "checksum failures"),
                Query("sum (sluice_kv_quarantine_alarms_total{@})", "quarantine alarms"),
                Query("sum (sluice_kv_double_releases_total{@})", "double releases"),
                Query("sum (sluice_kv_stale_epoch_rejects_total{@})", "of ended lives"),
            ),
        ),
    ),
)
BLOCKS: Final = Row(
    "Blocks",
    (
        Panel(
            "Prefill's blocks",
            (Query('sum by (state) (sluice_kv_blocks{@,role="prefill"})', "{{state}}"),),
            stacked=True,
        ),
        Panel(
            "Decode's blocks",
            (Query('sum by (state) (sluice_kv_blocks{@,role="decode"})', "{{state}}"),),
            stacked=True,
        ),
        Panel(
            "Share of prompt tokens found in a cache",
            (
                Query(
                    "sum by (role, tier) (rate(sluice_prefix_cache_hit_tokens_total{@}"
                    "[$__rate_interval])) / on (role) group_left () "
                    + rate("sluice_prefix_cache_query_tokens_total", "role"),
                    "{{role}} {{tier}}",
                ),
            ),
            "percentunit",
        ),
        Panel(
            "Blocks handed out and back",
            (
                Query(rate("sluice_kv_block_allocations_total", "role"), "{{role}}"),
                Query(rate("sluice_kv_evictions_total", "role"), "{{role}}, evicted for it"),
                Query(rate("sluice_kv_window_releases_total", "role"), "{{role}}, behind windows"),
                Query(
                    rate("sluice_kv_deferred_releases_total", "role"), "{{role}}, release deferred"
                ),
                Query(
                    rate("sluice_kv_block_alloc_failures_total", "role"),
                    "{{role}}, not enough left",
                ),
            ),
            "ops",
        ),
        Panel(
            "From allocation until free, mean",
            (
                Query(mean("sluice_kv_block_lifetime_seconds", "role"), "{{role}} life"),
                Query(
                    mean("sluice_kv_block_idle_before_evict_seconds", "role"),
                    "{{role}} idle before eviction",
                ),
            ),
            "s",
        ),
        Panel(
            "Released, not reusable yet",
            (
                Query(
                    "max by (role, state) (sluice_kv_block_withheld_oldest_seconds{@})",
                    "{{role}} {{state}}, oldest",
                ),
                Query(
                    mean("sluice_kv_block_withheld_seconds", "role", "state"),
                    "{{role}} {{state}}, mean",
                ),
            ),
            "s",
            "fenced: a step may still write it; quarantined: a read may.",
        ),
        Panel(
            "Registered memory",
            (Query("sum by (role) (sluice_kv_registered_bytes{@})", "{{role}}"),),
            "bytes",
        ),
        Panel(
            "Bounds in force",
            (
                Query("sum (sluice_admission_reserve_blocks{@})", "kept for growth"),
                Query("sum (sluice_kv_quarantine_limit_blocks{@})", "quarantine alarm at"),
            ),
        ),
    ),
)
TIERS: Final = Row(
    "Tiers",
    (
        Panel(
            "Blocks by tier",
            (Query("sum by (tier, state) (sluice_kv_tier_blocks{@})", "{{tier}} {{state}}"),),
            stacked=True,
            needs=_TIERS,
        ),
        Panel(
            "Bytes moved",
            (
                Query(
                    rate("sluice_kv_tier_bytes_total", "tier", "direction"),
                    "{{tier}} {{direction}}",
                ),
            ),
            "Bps",
            needs=_TIERS,
        ),
        Panel(
            "Operations",
            (
                Query(
                    rate("sluice_kv_tier_stores_total", "tier", "result"),
                    "store {{tier}} {{result}}",
                ),
                Query(
                    rate("sluice_kv_tier_fetches_total", "tier", "result"),
                    "fetch {{tier}} {{result}}",
                ),
                Query(
                    rate("sluice_kv_tier_lookups_total", "tier", "result"),
                    "look-up {{tier}} {{result}}",
                ),
                Query(rate("sluice_kv_tier_evictions_total", "tier"), "evict {{tier}}"),
            ),
            "ops",
            needs=_TIERS,
        ),
        Panel(
            "Time of an operation, mean",
            (Query(mean("sluice_kv_tier_seconds", "kind"), "{{kind}}"),),
            "s",
            needs=_TIERS,
        ),
        Panel(
            "Storage left alone",
            (Query("sum by (role) (sluice_kv_storage_left_alone{@})", "{{role}}"),),
            needs="`cache.storage_url`",
        ),
        Panel(
            "Verified by poison",
            (Query(rate("sluice_kv_poison_verified_blocks_total", "role"), "{{role}}"),),
            "ops",
            needs="`cache.poison`",
        ),
    ),
)
TRANSFER_BLOCKS: Final = Dashboard(
    uid="sluice-transfer-blocks",
    title="Sluice / Transfer and blocks",
    text="How KV travels from prefill to decode, where it lies, and what holds it.",
    rows=(READS, PAIRS, BLOCKS, TIERS),
    variables=OF_A_DEPLOYMENT,
)
