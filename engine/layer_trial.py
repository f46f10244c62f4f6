"""Runs a decoder layer and its compiled replacement on the same small batch, to compare them."""

import copy
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import torch
from torch import nn

from core.ids import Slot
from core.kv_layout import KVDtype, KVLayout
from engine.attention_native import NativeAttention
from engine.attention_reference import ReferenceAttention
from engine.batch import SequenceInput
from engine.kv_pool import KVPool
from engine.native_library import NativeLibrary
from engine.plan import ForwardPlan, build_plan

TRIAL_LENGTHS = (11, 1, 3)
TRIAL_SCALE = 0.05
"""Of the random residual: small, so that what the layer adds decides the result."""
_KV_DTYPES: dict[torch.dtype, KVDtype] = {
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
}


@dataclass(frozen=True, slots=True)
class LayerTrace:
    """How ``transformers`` calls one layer."""

    kwargs: dict[str, Any]
    hidden_size: int
    num_heads: int
    scaling: float
    softcap: float | None
    sinks: torch.Tensor | None


class _Recorder(ReferenceAttention):
    """Reference attention that notes what each layer's module asks for."""

    def __init__(self, plan: ForwardPlan, pool: KVPool) -> None:
        super().__init__(plan, pool)
        self.calls: dict[int, dict[str, Any]] = {}

    def attend(self, layer: int, query: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:  # noqa: ANN401
        self.calls[layer] = {"num_heads": query.shape[1], **kwargs}
        return super().attend(layer, query, *args, **kwargs)


class LayerTrial:
    """A small batch on pools of its own, to run an original layer and its replacement on.

    Its KV is in the model's ``dtype``, whatever that of ``layout``: a pool that keeps less would
    hide a layer that computes otherwise.
    """

    def __init__(self, layout: KVLayout, dtype: torch.dtype) -> None:
        layout = msgspec.structs.replace(layout, dtype=_KV_DTYPES[dtype])
        self.layout, self.dtype = layout, dtype
        sizes = [layout.num_blocks_for(length) for length in TRIAL_LENGTHS]
        self._num_blocks = sum(sizes) * len(layout.groups)
        ids = np.arange(self._num_blocks, dtype=np.int32)[::-1].copy()
        tables = iter(np.split(ids, np.cumsum(sizes * len(layout.groups))))
        by_group = [[next(tables) for _ in sizes] for _ in layout.groups]
        self._sequences = [
            SequenceInput(
                slot=Slot(index),
                token_ids=[(7 * index + at) % 50 for at in range(length)],
                position=0,
                block_tables=tuple(group[index] for group in by_group),
                sample=True,
            )
            for index, length in enumerate(TRIAL_LENGTHS)
        ]
        self._plan = build_plan(self._sequences, layout, device=torch.device("cpu"))

    def _pool(self, layout: KVLayout) -> KVPool:
        return KVPool(layout, self._num_blocks, device=torch.device("cpu"))

    def trace(self, module: Any, layers: nn.ModuleList) -> list[LayerTrace]:  # noqa: ANN401
        """Return how the model calls each of its layers."""
        seen: list[dict[str, Any]] = []
        hooks = [
            layer.register_forward_pre_hook(
                lambda _layer, _args, kwargs: seen.append(kwargs), with_kwargs=True
            )
            for layer in layers
        ]
        recorder = _Recorder(self._plan, self._pool(self.layout))
        module(
            input_ids=self._plan.token_ids[None],
            position_ids=self._plan.positions[None],
            attention_mask=torch.zeros(1, 1, 1, 1),
            use_cache=False,
            paged=recorder,
        )
        for hook in hooks:
            hook.remove()
        return [
            LayerTrace(
                kwargs={name: value for name, value in kwargs.items() if name != "hidden_states"},
                hidden_size=module.config.get_text_config().hidden_size,
                num_heads=call["num_heads"],
                scaling=call["scaling"],
                softcap=call["softcap"],
                sinks=call["sinks"],
            )
            for kwargs, (_, call) in zip(seen, sorted(recorder.calls.items()), strict=True)
        ]

    def difference(
        self,
        compiled: nn.Module,
        original: nn.Module,
        trace: LayerTrace,
        *,
        library: NativeLibrary,
    ) -> float:
        """Return how far the compiled layer is from the original in float32, relative."""
        generator = torch.Generator().manual_seed(0)
        hidden = trace.hidden_size
        x = torch.randn(1, self._plan.num_tokens, hidden, generator=generator) * TRIAL_SCALE
        x = x.to(self.dtype)
        exact = msgspec.structs.replace(self.layout, dtype="float32")
        wanted = copy.deepcopy(original).float()(
            x.float(),
            **{
                **trace.kwargs,
                "position_embeddings": tuple(
                    part.float() for part in trace.kwargs["position_embeddings"]
                ),
                "paged": ReferenceAttention(self._plan, self._pool(exact)),
            },
        )
        wanted = wanted[0] if isinstance(wanted, tuple) else wanted
        ours = compiled(
            x,
            position_embeddings=trace.kwargs["position_embeddings"],
            paged=NativeAttention(self._plan, self._pool(self.layout), library),
        )
        return float((ours.float() - wanted).norm() / wanted.norm())
