"""Where a token's K and V live in a pool: agreed by engine, block manager and peers.

A block is ``[layers, 2, block_size, heads, row]`` of its group, contiguous. A row is what one head
keeps of one token's K or V: ``head_dim`` numbers, and behind numbers in float8 their float32
scale, so that any run of rows can be read without looking elsewhere. Every group's blocks have
equal bytes, so that one pool serves all groups and a block id alone gives an address.
"""

import math
from collections.abc import Sequence
from typing import Annotated, Literal, NamedTuple

import msgspec
from msgspec import Meta

from core.bounds import MAX_GROUPS, MAX_LAYERS, Count, Head, Layer, Positive
from core.errors import ConfigError

KVDtype = Literal["float32", "bfloat16", "float16", "float8_e4m3"]
ITEM_NBYTES: dict[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3": 1}
SCALE_NBYTES = 4
_ROW_ALIGNMENT = 4
"""Scales are float32, and a pool is also read and filled by 32-bit words."""


class HeadWindow(msgspec.Struct, frozen=True):
    """KV heads of one layer that see less than its other heads."""

    heads: tuple[int, ...]
    """Ascending."""
    window: int
    num_sinks: int = 0


class LayerSpec(msgspec.Struct, frozen=True):
    """What attention of one layer keeps per token."""

    num_kv_heads: int
    head_dim: int
    window: int | None = None
    """Tokens that attention reaches back, the current one included; None: all."""
    num_sinks: int = 0
    """First tokens that stay visible beside the window."""
    head_window: HeadWindow | None = None
    """For some heads, instead of the two above."""


class KVGroup(msgspec.Struct, frozen=True):
    """(layer, KV head) pairs that share one attention span, and so one block table."""

    layers: Annotated[tuple[Layer, ...], Meta(min_length=1, max_length=MAX_LAYERS)]
    window: Positive | None = None
    num_sinks: Count = 0
    heads: Annotated[tuple[Head, ...], Meta(min_length=1, max_length=MAX_LAYERS)] | None = None
    """KV heads of each of the layers, ascending; None: all."""


class KVLayout(msgspec.Struct, frozen=True):
    """The shape of a pool's blocks."""

    groups: Annotated[tuple[KVGroup, ...], Meta(min_length=1, max_length=MAX_GROUPS)]
    block_size: Positive
    """Token slots in one block."""
    num_kv_heads: Positive
    """Of one layer."""
    head_dim: Positive
    dtype: KVDtype
    """Of the numbers in the pool; the model may compute in another."""

    @property
    def num_layers(self) -> int:
        """Layers of the model."""
        return len({layer for group in self.groups for layer in group.layers})

    @property
    def layers_per_group(self) -> int:
        """Layers in each group (equal for all)."""
        return len(self.groups[0].layers)

    @property
    def heads_per_group(self) -> int:
        """KV heads of each layer in each group (equal for all)."""
        return len(self.heads_of(self.groups[0]))

    def heads_of(self, group: KVGroup) -> Sequence[int]:
        """Return the KV heads of ``group``, ascending."""
        return range(self.num_kv_heads) if group.heads is None else group.heads

    @property
    def has_scales(self) -> bool:
        """Whether each row ends with the scale of its numbers."""
        return self.dtype == "float8_e4m3"

    @property
    def row_nbytes(self) -> int:
        """Bytes of K (or of V) of one token and one head."""
        scale_nbytes = SCALE_NBYTES if self.has_scales else 0
        return self.head_dim * ITEM_NBYTES[self.dtype] + scale_nbytes

    @property
    def token_layer_nbytes(self) -> int:
        """Bytes of K (or of V) of one token in one layer of a group."""
        return self.heads_per_group * self.row_nbytes

    @property
    def layer_nbytes(self) -> int:
        """Bytes of one layer in one block of any group."""
        return 2 * self.block_size * self.token_layer_nbytes

    @property
    def block_nbytes(self) -> int:
        """Bytes of one block of any group."""
        return self.layers_per_group * self.layer_nbytes

    @property
    def token_nbytes(self) -> int:
        """KV bytes of one token over all layers."""
        return len(self.groups) * self.block_nbytes // self.block_size

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks per group that hold ``num_tokens`` tokens."""
        return -(-num_tokens // self.block_size)


class _Span(NamedTuple):
    """What some heads of a layer see."""

    window: int | None
    num_sinks: int
    heads: tuple[int, ...]


def group_layers(layers: Sequence[LayerSpec], *, block_size: int, dtype: KVDtype) -> KVLayout:
    """Form groups of equal bytes: what has one span goes together, larger sets are split.

    Raises:
        ConfigError: layers differ in KV heads or head size, so their blocks cannot be equal, or
            rows of this head size have no room for a scale.
    """
    shapes = {(layer.num_kv_heads, layer.head_dim) for layer in layers}
    if len(shapes) != 1:
        raise ConfigError(
            f"model: layers with different KV shapes {sorted(shapes)} are not supported; "
            "use a model whose layers share one (kv_heads, head_dim)"
        )
    (num_kv_heads, head_dim) = shapes.pop()
    layers_by_span: dict[_Span, list[int]] = {}
    for index, layer in enumerate(layers):
        for span in _spans(layer):
            layers_by_span.setdefault(span, []).append(index)
    # Transfers take ranges of a group's layers: equal bytes alone would not do.
    num_layers = math.gcd(*(len(indices) for indices in layers_by_span.values()))
    num_heads = math.gcd(*(len(span.heads) for span in layers_by_span))
    groups = tuple(
        KVGroup(
            layers=tuple(indices[layer : layer + num_layers]),
            window=span.window,
            num_sinks=span.num_sinks,
            heads=None if num_heads == num_kv_heads else span.heads[head : head + num_heads],
        )
        for span, indices in layers_by_span.items()
        for layer in range(0, len(indices), num_layers)
        for head in range(0, len(span.heads), num_heads)
    )
    layout = KVLayout(
        groups=groups,
        block_size=block_size,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        dtype=dtype,
    )
    if layout.has_scales and layout.row_nbytes % _ROW_ALIGNMENT:
        raise ConfigError(
            f"cache.kv_dtype={dtype}: heads of {head_dim} numbers are not a multiple of "
            f"{_ROW_ALIGNMENT} bytes; use cache.kv_dtype=auto for this model"
        )
    return layout


def _spans(layer: LayerSpec) -> list[_Span]:
    """Return the spans of a layer's heads, that of its first head first."""
    special = layer.head_window
    windowed = () if special is None else special.heads
    others = tuple(head for head in range(layer.num_kv_heads) if head not in windowed)
    spans = [_Span(layer.window, layer.num_sinks, others)]
    if special is not None:
        spans.append(_Span(special.window, special.num_sinks, special.heads))
    return sorted((span for span in spans if span.heads), key=lambda span: span.heads)
