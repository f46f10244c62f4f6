"""Paged attention in plain torch, on any device: what every other implementation is held against.

Scores and softmax are in float32. A position outside the window or behind the sequence's end is
never read: its index is moved onto a visible position before the gather, and masked after it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.attention import layer_places
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
        self._places = layer_places(pool.layout)
        self._gathers: dict[int, Sequence[_Gather]] = {}

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
        group, place = self._places[layer]
        keys, values = self._pool.keys[place], self._pool.values[place]
        slots = self._plan.slot_mappings[group]
        block_size = self._pool.layout.block_size
        keys[slots // block_size, slots % block_size] = key
        values[slots // block_size, slots % block_size] = value
        if group not in self._gathers:
            self._gathers[group] = _gathers(
                self._plan,
                group,
                window=self._pool.layout.groups[group].window,
                block_size=block_size,
            )
        output = torch.empty_like(query)
        for gather in self._gathers[group]:
            blocks, offsets = gather.slots // block_size, gather.slots % block_size
            output[gather.rows] = _attend(
                query[gather.rows],
                keys[blocks, offsets],
                values[blocks, offsets],
                gather.visible,
                scaling=scaling,
                softcap=softcap,
                sinks=sinks,
            ).to(query.dtype)
        return output


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


def _gathers(
    plan: ForwardPlan, group: int, *, window: int | None, block_size: int
) -> Sequence[_Gather]:
    """Return one gather for all single-token parts, and tiles of one sequence for the others."""
    starts, kv_lens = plan.host_query_starts, plan.host_kv_lens
    lengths = starts[1:] - starts[:-1]
    singles = [index for index in range(len(kv_lens)) if lengths[index] == 1]
    gathers: list[_Gather] = []
    if singles:
        device = plan.kv_lens.device
        gathers.append(
            _gather(
                plan.block_tables[group][torch.tensor(singles, device=device)],
                rows=torch.tensor(starts[singles], device=device),
                positions=torch.tensor(kv_lens[singles] - 1, device=device),
                window=window,
                block_size=block_size,
            )
        )
    for index in range(len(kv_lens)):
        if lengths[index] > 1:
            rows = torch.arange(starts[index], starts[index + 1], device=plan.kv_lens.device)
            gathers.extend(
                _gather(
                    plan.block_tables[group][index : index + 1],
                    rows=tile,
                    positions=plan.positions[tile],
                    window=window,
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
    window: int | None,
    block_size: int,
) -> _Gather:
    last = positions[:, None]
    first = torch.zeros_like(last) if window is None else (last - window + 1).clamp(min=0)
    # One table for all rows: they share the span from the first row's first to the last's last.
    shared = tables.shape[0] == 1
    span_first = first.min(dim=0, keepdim=True).values if shared else first
    span_last = last.max(dim=0, keepdim=True).values if shared else last
    length = int((span_last - span_first).max()) + 1
    seen = span_first + torch.arange(length, device=rows.device)
    readable = torch.minimum(seen, span_last)
    slots = (
        torch.gather(tables.long(), 1, readable // block_size) * block_size + readable % block_size
    )
    return _Gather(rows=rows, slots=slots, visible=(seen >= first) & (seen <= last))
