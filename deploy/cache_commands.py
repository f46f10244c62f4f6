"""``sluice cache reset`` and ``sluice cache show``: the prefix caches of a running deployment."""

import time

from rich.console import Console
from rich.table import Table

from deploy.api_client import ApiClient, CacheStatus

EXIT_NOT_DONE = 1
POLL_INTERVAL_S = 0.25
STATES = ("free", "active", "receiving", "cached", "fenced", "quarantined", "leased")


def run_cache_reset(url: str, *, wait_s: float) -> int:
    """Reset all caches of the router at ``url``; return 0 if nothing old is left, else 1.

    Looks again until it is so, for at most ``wait_s`` seconds. A worker that could not be reached
    was not reset: the command must be given again when it is back.

    Raises:
        ConfigError: ``url`` is malformed.
        SluiceError: nothing answers there, or not a Sluice router.
    """
    client = ApiClient(url.rstrip("/").removesuffix("/v1"))
    deadline = time.monotonic() + wait_s
    status_of = {w.worker_id: w.status for w in client.reset_caches().workers}
    while "pending" in status_of.values() and time.monotonic() < deadline:
        time.sleep(POLL_INTERVAL_S)  # an HTTP client is told nothing unless it asks
        for cache in client.caches():
            if status_of.get(cache.worker_id) == "pending" and cache.reset == "done":
                status_of[cache.worker_id] = "done"
    console = Console()
    for worker_id, status in status_of.items():
        console.print(f"{worker_id}: {status}", highlight=False)
    return 0 if set(status_of.values()) <= {"done"} else EXIT_NOT_DONE


def run_cache_show(url: str) -> int:
    """Print blocks by state, hit rate, evictions and tiers of every worker; return 0.

    Raises:
        ConfigError: ``url`` is malformed.
        SluiceError: nothing answers there, or not a Sluice router.
    """
    client = ApiClient(url.rstrip("/").removesuffix("/v1"))
    Console().print(_table(client.caches()))
    return 0


def _table(caches: list[CacheStatus]) -> Table:
    table = Table("worker")
    for name in (*STATES, "hit rate", "evictions", "reset", "tiers"):
        table.add_column(name, justify="right")
    for cache in caches:
        if cache.status == "unreachable":
            table.add_row(cache.worker_id, *("?" for _ in STATES), "?", "?", "?", "unreachable")
            continue
        tiers = ", ".join(f"{use.tier} {use.blocks}" for use in cache.tiers)
        table.add_row(
            cache.worker_id,
            *(str(cache.blocks.get(state, 0)) for state in STATES),
            f"{cache.hit_rate:.1%}",
            str(cache.evictions),
            cache.reset,
            tiers,
        )
    return table
