"""Paged attention in plain torch, on any device: what every other implementation is held against.

Scores and softmax are in float32. A position that is neither a sink nor in the window, or that is
behind the sequence's end, is never read: its index is moved onto a visible position before the
gather, and masked after it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from core.kv_layout import KVGroup
from engine.attention import LayerPart, layer_parts
from engine.kv_pool import KVPool
from engine.plan import ForwardPlan

QUERY_TILE = 256
"""Query rows of one sequence whose scores exist at once."""


@dataclass(frozen=True, slots=True)
class _Gather:
    """N rows of queries (of N sequences, or of one) and the pool slots that they may see."""

    rows: torch.Tensor
    """[N] int64 rows of the step."""
    slots: torch.Tensor
    """[N or 1, L] int64 pool slots."""
    visible: torch.Tensor
    """[N, L] bool."""


class ReferenceAttention:
    """Attention of one forward."""

    def __init__(self, plan: ForwardPlan, pool: KVPool) -> None:
        self._plan = plan
        self._pool = pool
        self._parts = layer_parts(pool.layout)
        self._gathers: dict[int, Sequence[_Gather]] = {}
        self._indices: dict[tuple[int, ...], torch.Tensor] = {}

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
        rows = _Rows(query, key, value, sinks)
        parts = self._parts[layer]
        if len(parts) == 1:
            return self._attend_part(parts[0], rows, scaling=scaling, softcap=softcap)
        output = torch.empty_like(query)
        for part in parts:
            heads, query_heads = self._heads_of(part, query.shape[1])
            output[:, query_heads] = self._attend_part(
                part, rows.of_heads(heads, query_heads), scaling=scaling, softcap=softcap
            )
        return output

    def _heads_of(self, part: LayerPart, num_heads: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the part's KV heads and the query heads that go with them."""
        per_head = num_heads // self._pool.layout.num_kv_heads
        heads = tuple(part.heads)
        query_heads = tuple(head * per_head + at for head in heads for at in range(per_head))
        for chosen in (heads, query_heads):
            if chosen not in self._indices:
                self._indices[chosen] = torch.tensor(chosen, device=self._plan.kv_lens.device)
        return self._indices[heads], self._indices[query_heads]

    def _attend_part(
        self, part: LayerPart, rows: "_Rows", *, scaling: float, softcap: float | None
    ) -> torch.Tensor:
        keys, values = self._pool.key_rows[part.place], self._pool.value_rows[part.place]
        slots = self._plan.slot_mappings[part.group]
        block_size = self._pool.layout.block_size
        keys.store(slots // block_size, slots % block_size, rows.key)
        values.store(slots // block_size, slots % block_size, rows.value)
        output = torch.empty_like(rows.query)
        for gather in self._gathers_of(part.group):
            blocks, offsets = gather.slots // block_size, gather.slots % block_size
            output[gather.rows] = _attend(
                rows.query[gather.rows],
                keys.load(blocks, offsets),
                values.load(blocks, offsets),
                gather.visible,
                scaling=scaling,
                softcap=softcap,
                sinks=rows.sinks,
            ).to(output.dtype)
        return output

    def _gathers_of(self, group: int) -> Sequence[_Gather]:
        if group not in self._gathers:
            layout = self._pool.layout
            self._gathers[group] = _gathers(
                self._plan, group, layout.groups[group], block_size=layout.block_size
            )
        return self._gathers[group]


@dataclass(frozen=True, slots=True)
class _Rows:
    """What attention is asked for: [T, heads, head_dim], and [heads] logits of ``sinks``."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    sinks: torch.Tensor | None

    def of_heads(self, heads: torch.Tensor, query_heads: torch.Tensor) -> "_Rows":
        """Return the same for some of the heads."""
        return _Rows(
            query=self.query[:, query_heads],
            key=self.key[:, heads],
            value=self.value[:, heads],
            sinks=None if self.sinks is None else self.sinks[query_heads],
        )


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    visible: torch.Tensor,
    *,
    scaling: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    num_rows, num_heads, head_dim = query.shape
    num_tables, length, num_kv_heads, _ = key.shape
    rows_per_table, heads_per_kv = num_rows // num_tables, num_heads // num_kv_heads
    # [tables, kv_heads, rows * heads_per_kv, ...]: one product per table and KV head.
    grouped = query.float().view(num_tables, rows_per_table, num_kv_heads, heads_per_kv, head_dim)
    grouped = grouped.transpose(1, 2).reshape(num_tables, num_kv_heads, -1, head_dim)
    key, value = key.float().transpose(1, 2), value.float().transpose(1, 2)
    scores = torch.matmul(grouped, key.transpose(2, 3)) * scaling
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.view(num_tables, num_kv_heads, rows_per_table, heads_per_kv, length)
    hidden = ~visible.view(num_tables, 1, rows_per_table, 1, length)
    scores = scores.masked_fill_(hidden, float("-inf"))
    if sinks is not None:
        column = sinks.float().view(1, num_kv_heads, 1, heads_per_kv, 1)
        scores = torch.cat((scores, column.expand(*scores.shape[:-1], 1)), dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., :length]
    output = torch.matmul(weights.reshape(num_tables, num_kv_heads, -1, length), value)
    output = output.view(num_tables, num_kv_heads, rows_per_table, heads_per_kv, head_dim)
    return output.transpose(1, 2).reshape(num_rows, num_heads, head_dim)


def _gathers(plan: ForwardPlan, at: int, group: KVGroup, *, block_size: int) -> Sequence[_Gather]:
    """Return one gather for all single-token parts, and tiles of one sequence for the others.

    Args:
        plan: Of the step.
        at: Number of the group.
        group: The group itself.
        block_size: Tokens of a block.
    """
    starts, kv_lens = plan.host_query_starts, plan.host_kv_lens
    lengths = starts[1:] - starts[:-1]
    singles = [index for index in range(len(kv_lens)) if lengths[index] == 1]
    gathers: list[_Gather] = []
    if singles:
        device = plan.kv_lens.device
        gathers.append(
            _gather(
                plan.block_tables[at][torch.tensor(singles, device=device)],
                rows=torch.tensor(starts[singles], device=device),
                positions=torch.tensor(kv_lens[singles] - 1, device=device),
                group=group,
                block_size=block_size,
            )
        )
    for index in range(len(kv_lens)):
        if lengths[index] > 1:
            rows = torch.arange(starts[index], starts[index + 1], device=plan.kv_lens.device)
            gathers.extend(
                _gather(
                    plan.block_tables[at][index : index + 1],
                    rows=tile,
                    positions=plan.positions[tile],
                    group=group,
                    block_size=block_size,
                )
                for tile in rows.split(QUERY_TILE)
            )
    return gathers


def _gather(
    tables: torch.Tensor,
    *,
    rows: torch.Tensor,
    positions: torch.Tensor,
    group: KVGroup,
    block_size: int,
) -> _Gather:
    last = positions[:, None]
    window = group.window
    first = torch.zeros_like(last) if window is None else (last - window + 1).clamp(min=0)
    # One table for all rows: they share the span from the first row's first to the last's last.
    shared = tables.shape[0] == 1
    span_first = first.min(dim=0, keepdim=True).values if shared else first
    span_last = last.max(dim=0, keepdim=True).values if shared else last
    length = int((span_last - span_first).max()) + 1
    seen = span_first + torch.arange(length, device=rows.device)
    visible = (seen >= first) & (seen <= last)
    # Sinks inside a row's window are visible there, and once is enough.
    num_sinks = min(group.num_sinks, int(first.max())) if group.num_sinks else 0
    if num_sinks:
        sinks = torch.arange(num_sinks, device=rows.device)[None]
        seen = torch.cat((sinks.expand(len(seen), -1), seen), dim=1)
        visible = torch.cat((sinks < first, visible), dim=1)
    readable = torch.minimum(seen, span_last)
    slots = (
        torch.gather(tables.long(), 1, readable // block_size) * block_size + readable % block_size
    )
    return _Gather(rows=rows, slots=slots, visible=visible)
