"""Where a token's K and V live in a pool: agreed by engine, block manager and peers.

A block is ``[layers, 2, block_size, kv_heads, head_dim]`` of its group, contiguous. Every group's
blocks have equal bytes, so that one pool serves all groups and a block id alone gives an address.
"""

import math
from collections.abc import Sequence
from typing import Literal

import msgspec

from core.errors import ConfigError

KVDtype = Literal["float32", "bfloat16", "float16"]
ITEM_NBYTES: dict[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}


class LayerSpec(msgspec.Struct, frozen=True):
    """What attention of one layer keeps per token."""

    num_kv_heads: int
    head_dim: int
    window: int | None = None
    """Tokens that attention reaches back, the current one included; None: all."""
    num_sinks: int = 0
    """First tokens that stay visible beside the window."""


class KVGroup(msgspec.Struct, frozen=True):
    """Layers that share one attention span, and so one block table."""

    layers: tuple[int, ...]
    window: int | None = None
    num_sinks: int = 0


class KVLayout(msgspec.Struct, frozen=True):
    """The shape of a pool's blocks."""

    groups: tuple[KVGroup, ...]
    block_size: int
    """Token slots in one block."""
    num_kv_heads: int
    head_dim: int
    dtype: KVDtype

    @property
    def layers_per_group(self) -> int:
        """Layers in each group (equal for all)."""
        return len(self.groups[0].layers)

    @property
    def token_layer_nbytes(self) -> int:
        """Bytes of K (or of V) of one token in one layer."""
        return self.num_kv_heads * self.head_dim * ITEM_NBYTES[self.dtype]

    @property
    def block_nbytes(self) -> int:
        """Bytes of one block of any group."""
        return self.layers_per_group * 2 * self.block_size * self.token_layer_nbytes

    @property
    def token_nbytes(self) -> int:
        """KV bytes of one token over all layers."""
        return len(self.groups) * self.block_nbytes // self.block_size

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks per group that hold ``num_tokens`` tokens."""
        return -(-num_tokens // self.block_size)


def group_layers(layers: Sequence[LayerSpec], *, block_size: int, dtype: KVDtype) -> KVLayout:
    """Form groups of equal bytes: layers with one span go together, larger sets are split.

    Raises:
        ConfigError: layers differ in KV heads or head size, so their blocks cannot be equal.
    """
    shapes = {(layer.num_kv_heads, layer.head_dim) for layer in layers}
    if len(shapes) != 1:
        raise ConfigError(
            f"model: layers with different KV shapes {sorted(shapes)} are not supported; "
            "use a model whose layers share one (kv_heads, head_dim)"
        )
    layers_by_span: dict[tuple[int | None, int], list[int]] = {}
    for index, layer in enumerate(layers):
        layers_by_span.setdefault((layer.window, layer.num_sinks), []).append(index)
    size = math.gcd(*(len(indices) for indices in layers_by_span.values()))
    groups = tuple(
        KVGroup(layers=tuple(indices[at : at + size]), window=window, num_sinks=num_sinks)
        for (window, num_sinks), indices in layers_by_span.items()
        for at in range(0, len(indices), size)
    )
    (num_kv_heads, head_dim) = shapes.pop()
    return KVLayout(
        groups=groups,
        block_size=block_size,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        dtype=dtype,
    )
