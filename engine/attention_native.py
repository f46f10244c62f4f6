"""Paged attention by the compiled kernels, for one forward on the CPU."""

import torch

from core.kv_layout import KVLayout
from engine.attention import layer_places
from engine.kv_pool import KVPool
from engine.native_library import Attention, Group, NativeLibrary, Step
from engine.plan import ForwardPlan


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
    group, place = layer_places(layout)[layer]
    half_nbytes = layout.block_size * layout.token_layer_nbytes
    return Attention(
        group=group,
        key_offset=2 * place * half_nbytes,
        value_offset=(2 * place + 1) * half_nbytes,
        heads=num_heads,
        kv_heads=layout.num_kv_heads,
        head_dim=layout.head_dim,
        window=layout.groups[group].window or 0,
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
