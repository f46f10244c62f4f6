"""Heads of one layer that see different tokens, against dense attention with a mask per head.

A head that reads a token too many or too few gives plausible, wrong text. Every byte that a head
may not read is NaN: free blocks, unwritten slots, and the blocks between its sinks and its window.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from core.ids import Slot
from core.kv_layout import HeadWindow, KVDtype, KVLayout, LayerSpec, group_layers
from engine.attention import PagedAttention
from engine.attention_native import NativeAttention
from engine.attention_reference import ReferenceAttention
from engine.batch import HOLE, SequenceInput
from engine.kv_pool import KVPool
from engine.kv_rows import TORCH_DTYPES
from engine.native_library import NativeLibrary, open_native_library
from engine.plan import ForwardPlan, build_plan
from tests.engine.head_masks import visible_by_head

HEAD_DIM = 16
POISON = 0xFF
SOFTCAP = 4.0
CPU = torch.device("cpu")


@dataclass
class Case:
    """A random layout, and the queries, keys and values of some sequences."""

    layers: list[LayerSpec]
    layout: KVLayout
    num_heads: int
    lengths: list[int]
    sinks: torch.Tensor | None
    """[heads] logits without a value."""
    dtype: torch.dtype = torch.float32

    @classmethod
    def random(cls, seed: int, dtype: KVDtype = "float32") -> "Case":
        rng = np.random.default_rng(seed)
        num_kv_heads = int(rng.choice([2, 3, 4, 6]))
        num_windowed = int(rng.integers(1, num_kv_heads + 1))
        window = HeadWindow(
            heads=tuple(sorted(rng.permutation(num_kv_heads)[:num_windowed].tolist())),
            window=int(rng.choice([1, 2, 7, 16, 40, 64, 65, 130])),
            num_sinks=int(rng.choice([0, 1, 2, 3, 8, 20, 70])),
        )
        layers = [
            LayerSpec(num_kv_heads, HEAD_DIM, head_window=window),
            LayerSpec(num_kv_heads, HEAD_DIM, window=int(rng.choice([3, 20])))
            if seed % 2
            else LayerSpec(num_kv_heads, HEAD_DIM, head_window=window),
        ]
        num_heads = num_kv_heads * int(rng.choice([1, 2, 3]))
        generator = torch.Generator().manual_seed(seed)
        return cls(
            layers=layers,
            layout=group_layers(layers, block_size=int(rng.choice([4, 8, 16])), dtype=dtype),
            num_heads=num_heads,
            lengths=[int(rng.integers(150, 330)), int(rng.integers(20, 90)), 5],
            sinks=torch.randn(num_heads, generator=generator) if seed % 3 == 0 else None,
            dtype=TORCH_DTYPES[dtype],
        )

    def rows(self, sequence: int, layer: int) -> tuple[torch.Tensor, ...]:
        generator = torch.Generator().manual_seed(100 * sequence + layer)
        shapes = (self.num_heads, *[self.layout.num_kv_heads] * 2)
        length = self.lengths[sequence]
        return tuple(
            torch.randn(length, heads, HEAD_DIM, generator=generator).to(self.dtype)
            for heads in shapes
        )

    def dense(self, sequence: int, layer: int) -> torch.Tensor:
        """Attention of all rows with a mask per head, in float64."""
        query, key, value = (part.double() for part in self.rows(sequence, layer))
        per_head = self.num_heads // self.layout.num_kv_heads
        key, value = (part.repeat_interleave(per_head, dim=1) for part in (key, value))
        scores = torch.einsum("qhd,khd->hqk", query, key) / HEAD_DIM**0.5
        scores = SOFTCAP * torch.tanh(scores / SOFTCAP)
        hidden = ~visible_by_head(self.layers[layer], len(query)).repeat_interleave(per_head, dim=0)
        scores = scores.masked_fill(hidden, float("-inf"))
        if self.sinks is not None:
            column = self.sinks.double()[:, None, None].expand(-1, len(query), 1)
            scores = torch.cat((scores, column), dim=-1)
        weights = scores.softmax(dim=-1)[..., : len(key)]
        return torch.einsum("hqk,khd->qhd", weights, value)


class Tables:
    """Scattered blocks of each sequence and group; what falls behind a window becomes NaN."""

    def __init__(self, case: Case) -> None:
        self.layout = case.layout
        sizes = [self.layout.num_blocks_for(length) for length in case.lengths]
        num_blocks = sum(sizes) * len(self.layout.groups) + 1
        # The last block stays unowned: it is what a hole (-1) would read as an index.
        order = np.random.default_rng(0).permutation(num_blocks - 1).astype(np.int32)
        taken = iter(np.split(order, np.cumsum(sizes * len(self.layout.groups))))
        self.by_group = [[next(taken) for _ in sizes] for _ in self.layout.groups]
        self.pool = KVPool(self.layout, num_blocks, device=CPU)
        self.pool.fill(range(num_blocks), POISON)

    def punch_holes(self, sequence: int, position: int) -> None:
        size = self.layout.block_size
        for group, tables in zip(self.layout.groups, self.by_group, strict=True):
            if group.window is None:
                continue
            behind = slice(-(-group.num_sinks // size), max(0, position - group.window + 1) // size)
            gone = tables[sequence][behind]
            self.pool.fill(gone[gone != HOLE].tolist(), POISON)
            tables[sequence][behind] = HOLE

    def of(self, sequence: int) -> tuple[NDArray[np.int32], ...]:
        return tuple(tables[sequence] for tables in self.by_group)


def steps(case: Case, tables: Tables) -> Iterator[tuple[ForwardPlan, list[tuple[int, range]]]]:
    """Yield plans of prefill chunks beside single tokens, and what rows each has."""
    rng = np.random.default_rng(1)
    done = [0] * len(case.lengths)
    while any(at < length for at, length in zip(done, case.lengths, strict=True)):
        parts: list[SequenceInput] = []
        ranges: list[tuple[int, range]] = []
        for sequence, length in enumerate(case.lengths):
            end = min(length, done[sequence] + int(rng.choice([0, 1, 1, 6, 50, 120])))
            if end == done[sequence]:
                continue
            tables.punch_holes(sequence, done[sequence])
            ranges.append((sequence, range(done[sequence], end)))
            parts.append(
                SequenceInput(
                    slot=Slot(sequence),
                    token_ids=[0] * (end - done[sequence]),
                    position=done[sequence],
                    block_tables=tables.of(sequence),
                    sample=True,
                )
            )
            done[sequence] = end
        if parts:
            yield build_plan(parts, case.layout, device=CPU), ranges


@pytest.fixture(scope="module")
def library() -> NativeLibrary:
    return open_native_library(num_threads=1)


def open_attention(
    kind: str, plan: ForwardPlan, pool: KVPool, library: NativeLibrary
) -> PagedAttention:
    if kind == "native":
        return NativeAttention(plan, pool, library)
    return ReferenceAttention(plan, pool)


def assert_equals_dense(case: Case, kind: str, library: NativeLibrary, **tolerance: float) -> None:
    """Run ``case`` in parts over scattered blocks and hold every row against dense attention."""
    tables = Tables(case)
    wanted = {
        (sequence, layer): case.dense(sequence, layer)
        for sequence in range(len(case.lengths))
        for layer in range(len(case.layers))
    }
    options: dict[str, Any] = {"scaling": HEAD_DIM**-0.5, "softcap": SOFTCAP, "window": None}

    for plan, ranges in steps(case, tables):
        attention = open_attention(kind, plan, tables.pool, library)
        for layer in range(len(case.layers)):
            parts = [
                torch.cat([case.rows(sequence, layer)[at][rows] for sequence, rows in ranges])
                for at in range(3)
            ]
            output = attention.attend(layer, *parts, sinks=case.sinks, **options)
            expected = torch.cat([wanted[sequence, layer][rows] for sequence, rows in ranges])
            torch.testing.assert_close(output.double(), expected, **tolerance)


@pytest.mark.parametrize("kind", ["reference", "native"])
@pytest.mark.parametrize("seed", range(10))
def test_g13_every_head_reads_its_sinks_and_window_and_no_hole(
    library: NativeLibrary, seed: int, kind: str
) -> None:
    assert_equals_dense(Case.random(seed), kind, library, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["reference", "native"])
@pytest.mark.parametrize("seed", range(4))
def test_heads_stay_near_dense_attention_in_bfloat16(
    library: NativeLibrary, seed: int, kind: str
) -> None:
    assert_equals_dense(Case.random(seed, "bfloat16"), kind, library, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("kind", ["reference", "native"])
@pytest.mark.parametrize("num_sinks", range(4))
def test_g13_sinks_up_to_three_tokens(library: NativeLibrary, num_sinks: int, kind: str) -> None:
    """The sinks end inside the first block: the tokens behind them in it are there, unseen."""
    window = HeadWindow(heads=(1,), window=9, num_sinks=num_sinks)
    layers = [LayerSpec(2, HEAD_DIM, head_window=window)]
    case = Case(layers, group_layers(layers, block_size=4, dtype="float32"), 2, [90], None)

    assert_equals_dense(case, kind, library, rtol=1e-4, atol=1e-5)


def test_a_head_looks_at_its_sinks_and_window_alone() -> None:
    """Work, not just masks: a token that no row sees is not even gathered."""
    window = HeadWindow(heads=(0,), window=32, num_sinks=4)
    layers = [LayerSpec(2, HEAD_DIM, head_window=window)]
    case = Case(layers, group_layers(layers, block_size=8, dtype="float32"), 2, [700, 900], None)
    tables = Tables(case)
    parts = [
        SequenceInput(Slot(at), [0] * count, 600, tables.of(at), sample=True)
        for at, count in enumerate((1, 64))
    ]
    attention = ReferenceAttention(build_plan(parts, case.layout, device=CPU), tables.pool)

    windowed, full = (attention._gathers_of(group) for group in range(2))

    assert [gather.slots.shape[1] for gather in windowed] == [32 + 4, 32 + 63 + 4]
    assert [gather.slots.shape[1] for gather in full] == [601, 664]
