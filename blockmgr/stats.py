"""What a block manager counts. All counters only grow; a worker exports them."""

from dataclasses import dataclass


@dataclass(slots=True)
class BlockStats:
    """Events since the manager was made."""

    allocations: int = 0
    """Blocks handed out, evicted ones included."""
    evictions: int = 0
    """Blocks that left the prefix cache because they were handed out."""
    eviction_batches: int = 0
    """Times that blocks were evicted, each in one batch."""
    allocation_failures: int = 0
    """Calls that found too few blocks."""
    query_tokens: int = 0
    """Tokens in full blocks of admitted requests, as far as prefix caching was asked for."""
    hit_tokens: int = 0
    """Those of ``query_tokens`` that were pinned from the cache."""
    pruned_blocks: int = 0
    """Blocks released because they fell behind a sliding window."""
    deferred_releases: int = 0
    """Releases that had to wait for a step in flight."""
    double_releases: int = 0
    """Second releases of an owner, step or operation; each was refused."""
    failed_steps: int = 0
    """Steps that were retired after a device drain."""
    cache_resets: int = 0
