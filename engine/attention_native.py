"""Paged attention by the compiled kernels, for one forward on the CPU."""

import ctypes
from functools import cache

import torch

from core.kv_layout import KVLayout
from engine.attention import layer_parts
from engine.kv_pool import KVPool
from engine.native_library import (
    KV_AS_COMPUTED,
    KV_FLOAT8_E4M3,
    Attention,
    Group,
    KVHead,
    NativeLibrary,
    Step,
)
from engine.plan import ForwardPlan


@cache
def kv_head_places(layout: KVLayout, layer: int) -> "ctypes.Array[KVHead]":
    """Return where each KV head of a layer is, and what it sees."""
    half_nbytes = layout.block_size * layout.token_layer_nbytes
    places = (KVHead * layout.num_kv_heads)()
    for part in layer_parts(layout)[layer]:
        group = layout.groups[part.group]
        for at, head in enumerate(part.heads):
            places[head] = KVHead(
                group=part.group,
                key_offset=2 * part.place * half_nbytes + at * layout.row_nbytes,
                value_offset=(2 * part.place + 1) * half_nbytes + at * layout.row_nbytes,
                window=group.window or 0,
                first_tokens=group.num_sinks,
            )
    return places


def attention_structure(
    layout: KVLayout,
    layer: int,
    *,
    num_heads: int,
    scaling: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> Attention:
    """Return what the kernels need of a layer. ``sinks`` [heads] float32 must outlive it."""
    return Attention(
        # The cache keeps them alive: a copy of this structure has just their address.
        places=kv_head_places(layout, layer),
        token_nbytes=layout.token_layer_nbytes,
        heads=num_heads,
        kv_heads=layout.num_kv_heads,
        head_dim=layout.head_dim,
        sinks=None if sinks is None else sinks.data_ptr(),
        scaling=scaling,
        softcap=softcap or 0.0,
    )


class NativeAttention:
    """Attention of one forward, and the step structure that whole layers run on."""

    def __init__(self, plan: ForwardPlan, pool: KVPool, library: NativeLibrary) -> None:
        self.library = library
        # Held, because the step structure has their addresses.
        self._pool, self._plan = pool, plan
        self._groups = (Group * len(plan.block_tables))(
            *(
                Group(slots=slots.data_ptr(), blocks=table.data_ptr(), table_width=table.shape[1])
                for slots, table in zip(plan.slot_mappings, plan.block_tables, strict=True)
            )
        )
        self.step = Step(
            tokens=plan.num_tokens,
            sequences=plan.num_sequences,
            query_starts=plan.query_starts.data_ptr(),
            kv_lens=plan.kv_lens.data_ptr(),
            groups=self._groups,
            pool=pool.address,
            block_nbytes=pool.layout.block_nbytes,
            block_size=pool.layout.block_size,
            kv_type=KV_FLOAT8_E4M3 if pool.layout.has_scales else KV_AS_COMPUTED,
        )

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scaling: float,
        softcap: float | None,
        sinks: torch.Tensor | None,
        window: int | None,  # noqa: ARG002  # the group's window holds
    ) -> torch.Tensor:
        """See ``PagedAttention.attend``."""
        sinks = None if sinks is None else sinks.detach().float().contiguous()
        attention = attention_structure(
            self._pool.layout,
            layer,
            num_heads=query.shape[1],
            scaling=scaling,
            softcap=softcap,
            sinks=sinks,
        )
        return self.library.attend(attention, self.step, query, key, value)
