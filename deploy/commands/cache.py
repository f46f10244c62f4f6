"""``sluice cache reset`` and ``sluice cache show``: the prefix caches of a running deployment."""

import time
from dataclasses import dataclass
from typing import Final

from rich.console import Console

from core.ids import WorkerId
from core.tiers import Tier
from deploy.api_client import ApiClient, CacheStatus, ResetStatus, WorkerReset

EXIT_NOT_DONE = 1
POLL_INTERVAL_S = 0.25
ASKED_AGAIN: Final = (
    "reset again when all answer; a worker that has ended for good, but did not drain, is asked "
    "until a new process has its name or the router starts anew"
)
_NOT_IN_USE = ("free", "cached")
_BLOCKS_OF_TIER: Final = {
    Tier.DEVICE: "blocks cached",
    Tier.HOST: "blocks cached",
    # Other workers write there and delete, too; nobody counts what is there.
    Tier.STORAGE: "blocks that this worker knows of",
}

_IN_STORAGE: Final = {
    "none": "",
    "pending": ", in storage: pending",
    "done": ", in storage: done",
    "failed": ", in storage: failed",
}


@dataclass(slots=True)
class _Reset:
    """How far one worker's reset is."""

    worker_id: WorkerId
    status: ResetStatus
    in_use: str = ""
    """Its blocks in use now, by state; "": it did not answer."""
    is_due_in_storage: bool = False
    """Whether storage has not answered yet."""
    silent_s: float | None = None
    """How long it had not reported when it was reset; None: not told."""

    def take(self, cache: CacheStatus) -> None:
        """Take a later look at the worker's cache."""
        self.in_use = _count(cache, but=_NOT_IN_USE)
        self.is_due_in_storage = cache.storage == "pending"
        if cache.status != "ok":
            return
        if cache.reset == "none":
            # A new life of the worker knows of no reset, and may find the old in storage.
            self.status, self.silent_s = "unreachable", None
        elif cache.storage == "failed":
            self.status = "storage_failed"
        elif "pending" not in (cache.reset, cache.storage):
            self.status = "done"

    def line(self) -> str:
        if self.status == "storage_failed":
            return (
                f"{self.worker_id}: storage_failed: a worker that starts later may find old "
                "prefixes in storage; repair it and reset again"
            )
        if self.status == "unreachable":
            return _unreachable(self.worker_id, self.silent_s)
        if self.status != "pending":
            return f"{self.worker_id}: {self.status}"
        if self.is_due_in_storage:
            return f"{self.worker_id}: pending: storage has not answered yet"
        in_use = f"some of {self.in_use} blocks" if self.in_use else "it did not say which blocks"
        return (
            f"{self.worker_id}: pending: nothing old can be hit, but what was in use at the reset "
            f"still is: {in_use}"
        )


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
    resets = _wait(client, client.reset_caches().workers, deadline)
    console = Console(soft_wrap=True)
    for reset in resets:
        console.print(reset.line(), highlight=False)
    statuses = {reset.status for reset in resets}
    if "pending" in statuses:
        waited = f"waited {wait_s:g} s; " if wait_s else ""
        again = "look again with sluice cache show, or wait with sluice cache reset --wait SECONDS"
        console.print(f"{waited}{again}", highlight=False)
    if "unreachable" in statuses:
        console.print(ASKED_AGAIN, highlight=False)
    return 0 if statuses <= {"done"} else EXIT_NOT_DONE


def _wait(client: ApiClient, workers: list[WorkerReset], deadline: float) -> list[_Reset]:
    """Look at what is pending until nothing is or ``deadline`` is over, and once at least."""
    reset_of = {w.worker_id: _Reset(w.worker_id, w.status, silent_s=w.silent_s) for w in workers}
    while pending := {key for key, reset in reset_of.items() if reset.status == "pending"}:
        for cache in client.caches():
            if cache.worker_id in pending:
                reset_of[cache.worker_id].take(cache)
        if time.monotonic() >= deadline:
            break
        time.sleep(POLL_INTERVAL_S)  # an HTTP client is told nothing unless it asks
    return list(reset_of.values())


def run_cache_show(url: str) -> int:
    """Print blocks by state, hits by tier, evictions and the last reset of every worker; return 0.

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
        return [_unreachable(cache.worker_id, cache.silent_s)]
    return [
        f"{cache.worker_id}: {sum(cache.blocks.values())} blocks: {_count(cache)}",
        f"  {_hits(cache)}",
        *(
            f"  {use.tier}: {use.blocks} {_BLOCKS_OF_TIER[use.tier]}, {use.hit_tokens} tokens hit"
            for use in cache.tiers
        ),
        f"  {cache.evictions} blocks evicted from the pool",
        f"  last reset: {cache.reset}{_IN_STORAGE[cache.storage]}",
    ]


def _unreachable(worker_id: WorkerId, silent_s: float | None) -> str:
    silence = "" if silent_s is None else f", last heard of {silent_s:.0f} s ago"
    return f"{worker_id}: unreachable{silence}"


def _count(cache: CacheStatus, *, but: tuple[str, ...] = ()) -> str:
    """Return the blocks of each state that has any, those of ``but`` left out."""
    counts = cache.blocks.items()
    return ", ".join(f"{count} {state}" for state, count in counts if count and state not in but)


def _hits(cache: CacheStatus) -> str:
    """Return which part of the tokens looked up each tier had."""
    if not cache.query_tokens:
        return "no tokens looked up"
    shares = [(str(use.tier), use.hit_tokens / cache.query_tokens) for use in cache.tiers]
    parts = ", ".join(f"{share:.1%} {tier}" for tier, share in shares)
    whole = sum(share for _, share in shares)
    return f"{cache.query_tokens} tokens looked up, {whole:.1%} hit: {parts}"
