"""What prefill and decode workers may not have otherwise: it would keep all KV from crossing.

Only what the config alone decides. What depends on the model too is told when two workers meet.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from core.config_faults import Fault
from core.worker_config import CacheConfig, KVGroupsConfig, ModelConfig, TransferConfig


@dataclass(frozen=True, slots=True)
class RoleSections:
    """What workers of one role go by, as far as their peers must know it."""

    model: ModelConfig
    cache: CacheConfig
    transfer: TransferConfig


def find_mismatches(
    prefill: RoleSections, decode: RoleSections, kv_groups: KVGroupsConfig
) -> Iterator[Fault]:
    """Yield why no KV of ``prefill`` can become KV of ``decode``: field, both values and fix."""
    if prefill.transfer.transport != decode.transfer.transport:
        yield _fault(
            ("transfer", "transport"),
            (prefill.transfer.transport, decode.transfer.transport),
            "both must post reads the same way; give one, for all",
        )
    yield from _block_sizes(prefill.cache, decode.cache, kv_groups)
    if prefill.cache.kv_dtype != "auto" and decode.cache.kv_dtype == "auto":
        yield _fault(
            ("cache", "kv_dtype"),
            (prefill.cache.kv_dtype, decode.cache.kv_dtype),
            "what was rounded stays rounded; give it on decode, or on both",
        )
    if prefill.model.dtype != decode.model.dtype:
        yield _fault(
            ("model", "dtype"),
            (prefill.model.dtype, decode.model.dtype),
            "both must compute in one; cache.kv_dtype may differ",
        )


def _block_sizes(
    prefill: CacheConfig, decode: CacheConfig, kv_groups: KVGroupsConfig
) -> Iterator[Fault]:
    place, sizes = ("cache", "block_size"), (prefill.block_size, decode.block_size)
    head_window = kv_groups.head_window
    if max(sizes) % min(sizes):
        yield _fault(place, sizes, "let one be a multiple of the other")
    elif sizes[1] > sizes[0] and head_window is not None and head_window.ratio != 0:
        fix = "with kv_groups.head_window, decode's must not be the larger one"
        yield _fault(place, sizes, fix)


def _fault(place: tuple[str, str], values: tuple[object, object], fix: str) -> Fault:
    return Fault(
        (("prefill", *place), ("decode", *place), place),
        ".".join(place),
        f"prefill {values[0]!r}, decode {values[1]!r}: no KV can cross; {fix}",
    )
