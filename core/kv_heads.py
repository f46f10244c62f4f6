"""Which KV heads a head window takes, and which ones a rank holds: arithmetic only."""

from collections.abc import Sequence
from itertools import count

import msgspec

from core.config import HeadWindowConfig
from core.errors import ConfigError
from core.kv_layout import HeadWindow, LayerSpec

MAX_SEARCHED = 1024
"""Peers say numbers, too: what fits is not looked for among billions."""


def num_windowed_heads(num_kv_heads: int, ratio: float) -> int:
    """Return how many of ``num_kv_heads`` are ``ratio`` of them; a half counts as one."""
    return int(num_kv_heads * ratio + 0.5)


def heads_of_rank(num_kv_heads: int, *, rank: int, num_ranks: int) -> range:
    """Return the KV heads that one rank of a tensor-parallel group holds.

    With fewer heads than ranks, neighbouring ranks hold copies of one head.

    Raises:
        ConfigError: heads and ranks do not divide, so that ranks would differ in shape.
    """
    if not _divide(num_kv_heads, num_ranks):
        raise ConfigError(
            f"tensor_parallel_size={num_ranks}: the model's {num_kv_heads} KV heads cannot be "
            f"split or copied evenly; use {_fitting(num_kv_heads, num_ranks)}"
        )
    first = rank * num_kv_heads // num_ranks
    return range(first, first + max(1, num_kv_heads // num_ranks))


def _divide(num_kv_heads: int, num_ranks: int) -> bool:
    return num_kv_heads % num_ranks == 0 or num_ranks % num_kv_heads == 0


def _fitting(num_kv_heads: int, num_ranks: int) -> str:
    """Return the numbers of ranks next to ``num_ranks`` that would do."""
    if max(num_kv_heads, num_ranks) > MAX_SEARCHED:
        return "a divisor or a multiple of them"
    below = next(n for n in range(num_ranks, 0, -1) if _divide(num_kv_heads, n))
    above = next(n for n in count(num_ranks) if _divide(num_kv_heads, n))
    return f"{below} or {above}"


def with_head_window(
    layers: Sequence[LayerSpec], wanted: HeadWindowConfig | None
) -> tuple[LayerSpec, ...]:
    """Return ``layers``, each with full attention having the head window of the config.

    Layers that have a window keep it, for all their heads.

    Raises:
        ConfigError: the config selects no head, or one that is not there, or every layer has a
            window already; names the field, its value and the fix.
    """
    if wanted is None or wanted.ratio == 0:
        return tuple(layers)
    if all(layer.window is not None for layer in layers):
        raise ConfigError(
            f"kv_groups.head_window={_shown(wanted)}: every layer of the model has a window; "
            "leave head_window out"
        )
    return tuple(
        layer
        if layer.window is not None
        else msgspec.structs.replace(layer, head_window=_head_window(layer.num_kv_heads, wanted))
        for layer in layers
    )


def _head_window(num_kv_heads: int, wanted: HeadWindowConfig) -> HeadWindow:
    return HeadWindow(
        heads=_heads(num_kv_heads, wanted), window=wanted.window, num_sinks=wanted.sink
    )


def _heads(num_kv_heads: int, wanted: HeadWindowConfig) -> tuple[int, ...]:
    if wanted.ratio is not None:
        heads = tuple(range(num_windowed_heads(num_kv_heads, wanted.ratio)))
        if not heads:
            raise ConfigError(
                f"kv_groups.head_window.ratio={wanted.ratio}: selects none of the model's "
                f"{num_kv_heads} KV heads; use at least {0.5 / num_kv_heads:.3g}, or 0"
            )
        return heads
    heads = wanted.heads or ()
    if max(heads) >= num_kv_heads:
        raise ConfigError(
            f"kv_groups.head_window.heads={list(heads)}: the model has {num_kv_heads} KV heads; "
            f"use numbers up to {num_kv_heads - 1}"
        )
    return heads


def _shown(wanted: HeadWindowConfig) -> str:
    return str(wanted.model_dump(exclude_none=True))
