"""``sluice cache reset`` and ``sluice cache show``: the prefix caches of a running deployment."""

import time

from rich.console import Console

from deploy.api_client import ApiClient, CacheStatus

EXIT_NOT_DONE = 1
POLL_INTERVAL_S = 0.25


def run_cache_reset(url: str, *, wait_s: float) -> int:
    """Reset all caches of the router at ``url``; return 0 if nothing old is left, else 1.

    Looks again until it is so, for at most ``wait_s`` seconds. A worker that could not be reached
    was not reset, and neither was the new life of one: the command must be given again.

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
            if status_of.get(cache.worker_id) == "pending" and cache.reset != "pending":
                # A new life of the worker knows of no reset, and may find the old in storage.
                status_of[cache.worker_id] = "done" if cache.reset == "done" else "unreachable"
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
    console = Console(soft_wrap=True)
    for cache in ApiClient(url.rstrip("/").removesuffix("/v1")).caches():
        console.print("\n".join(_lines(cache)), highlight=False)
    return 0


def _lines(cache: CacheStatus) -> list[str]:
    if cache.status == "unreachable":
        return [f"{cache.worker_id}: unreachable"]
    states = ", ".join(f"{count} {state}" for state, count in cache.blocks.items() if count)
    return [
        f"{cache.worker_id}: {sum(cache.blocks.values())} blocks: {states}",
        f"  {cache.hit_rate:.1%} of looked-up tokens hit, {cache.evictions} blocks evicted",
        f"  last reset: {cache.reset}",
        *(f"  {use.tier}: {use.blocks} blocks, {use.hit_tokens} tokens hit" for use in cache.tiers),
    ]
