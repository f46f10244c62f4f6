"""Replaces decoder layers of a ``transformers`` model by compiled ones that give the same numbers.

Eager modules spend most of a small step between kernels. Each layer that is recognised is packed,
run beside the original on random input, and takes its place only if both agree; the original's
weights are freed at once, so that weights exist twice for one layer at most. Everything else, and
all that is around the layers, stays with ``transformers``.
"""

import copy
import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import torch
from torch import nn

from core.ids import Slot
from core.kv_layout import KVLayout
from engine.attention_native import NativeAttention, attention_structure
from engine.attention_reference import ReferenceAttention
from engine.batch import SequenceInput
from engine.kv_pool import KVPool
from engine.layer_recognition import (
    DecoderLayer,
    Projection,
    RMSNorm,
    UnrecognisedLayerError,
    read_layer,
)
from engine.native_library import (
    Layer,
    NativeLibrary,
    Norm,
    PackedMatrix,
    fits,
)
from engine.plan import ForwardPlan, build_plan

log = logging.getLogger(__name__)

HALF_PANEL = PackedMatrix.PANEL // 2
TRIAL_LENGTHS = (11, 1, 3)
TRIAL_SCALE = 0.05
"""Of the random residual: small, so that what the layer adds decides the result."""
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
"""Of the difference's norm over the result's."""


class LayerRun(nn.Module):
    """Consecutive compiled layers, in one call."""

    def __init__(self, library: NativeLibrary, layers: "list[PackedLayer]") -> None:
        super().__init__()
        self._library = library
        self._packed = layers
        self._structures = (Layer * len(layers))(*(layer.structure for layer in layers))
        self.attention_type = layers[0].attention_type
        self.hidden_size: int = layers[0].structure.down.columns

    def forward(
        self,
        hidden_states: torch.Tensor,
        *,
        paged: NativeAttention,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        **_kwargs: Any,  # noqa: ANN401  # what transformers passes to its own layers
    ) -> torch.Tensor:
        """Return the residual stream [1, T, hidden] behind the layers."""
        cos, sin = (part.float().contiguous() for part in position_embeddings)
        paged.step.cos, paged.step.sin = cos.data_ptr(), sin.data_ptr()
        x = hidden_states.clone(memory_format=torch.contiguous_format)
        self._library.run_layers(self._structures, paged.step, x[0])
        return x


class AbsorbedLayer(nn.Module):
    """The place of a layer that an earlier ``LayerRun`` has computed."""

    def __init__(self, attention_type: str | None) -> None:
        super().__init__()
        self.attention_type = attention_type

    def forward(self, hidden_states: torch.Tensor, **_kwargs: Any) -> torch.Tensor:  # noqa: ANN401
        """Return the residual stream as it is."""
        return hidden_states


class PackedHead(nn.Module):
    """The output embedding; logits are float32."""

    def __init__(self, library: NativeLibrary, linear: nn.Linear) -> None:
        super().__init__()
        self._library = library
        self._matrix = library.pack(linear.weight, linear.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits [1, R, vocab] of hidden states [1, R, hidden]."""
        return self._library.linear(x[0], self._matrix)[None]


@dataclass(frozen=True, slots=True)
class LayerTrace:
    """How ``transformers`` calls one layer."""

    kwargs: dict[str, Any]
    num_heads: int
    scaling: float
    softcap: float | None
    sinks: torch.Tensor | None


class PackedLayer:
    """Owns the memory of one layer's structure."""

    def __init__(
        self,
        library: NativeLibrary,
        parts: DecoderLayer,
        trace: LayerTrace,
        layout: KVLayout,
        index: int,
    ) -> None:
        self.attention_type: str | None = None
        self._norms: list[torch.Tensor] = []
        self._sinks = None if trace.sinks is None else trace.sinks.detach().float().contiguous()
        inner = parts.down.weight.shape[1]
        self._matrices = [
            _pack(library, parts.qkv),
            _pack(library, parts.output),
            _pack(library, parts.gate_up, order=_paired_order(inner)),
            _pack(library, parts.down),
        ]
        qkv, output, gate_up, down = (matrix.structure for matrix in self._matrices)
        cos, _ = trace.kwargs["position_embeddings"]
        self.structure = Layer(
            attention=attention_structure(
                layout,
                index,
                num_heads=trace.num_heads,
                scaling=trace.scaling,
                softcap=trace.softcap,
                sinks=self._sinks,
            ),
            before_attention=self._norm(parts.before_attention),
            after_attention=self._norm(parts.after_attention),
            before_mlp=self._norm(parts.before_mlp),
            after_mlp=self._norm(parts.after_mlp),
            query=self._norm(parts.query_norm),
            key=self._norm(parts.key_norm),
            rotary_dim=cos.shape[-1],
            qkv=qkv,
            output=output,
            gate_up=gate_up,
            down=down,
            activation=parts.activation,
        )

    def _norm(self, norm: RMSNorm | None) -> Norm:
        if norm is None:
            return Norm(weight=None, epsilon=0.0)
        weight = norm.weight.contiguous()
        self._norms.append(weight)
        return Norm(weight=weight.data_ptr(), epsilon=norm.epsilon)


def _pack(
    library: NativeLibrary, projection: Projection, order: torch.Tensor | None = None
) -> PackedMatrix:
    if not fits(projection.weight.shape[1], projection.weight.dtype):
        raise UnrecognisedLayerError(f"a weight of {tuple(projection.weight.shape)}")
    return library.pack(projection.weight, projection.bias, order)


def _paired_order(inner: int) -> torch.Tensor:
    """Return rows so that a panel holds gate and up of the same half panel of columns."""
    if inner % HALF_PANEL:
        raise UnrecognisedLayerError(f"an MLP of {inner} columns")
    gate = torch.arange(inner, dtype=torch.int32).view(-1, HALF_PANEL)
    return torch.stack((gate, gate + inner), dim=1).flatten().contiguous()


@torch.inference_mode()
def replace_layers(module: Any, library: NativeLibrary, layout: KVLayout) -> int:  # noqa: ANN401
    """Put compiled layers into ``module`` where they agree; return how many.

    The rest of the model goes on as it was, so that any result is a working model.
    """
    layers = _decoder_layers(module, sum(len(group.layers) for group in layout.groups))
    if layers is None:
        return 0
    trial = _Trial(layout, module.dtype)
    traces = trial.trace(module, layers)
    packed: list[PackedLayer | None] = []
    for index, layer in enumerate(layers):
        try:
            packed.append(_packed_layer(library, layer, traces[index], trial, index))
            layers[index] = AbsorbedLayer(getattr(layer, "attention_type", None))
        except UnrecognisedLayerError as error:
            log.info("layer stays with transformers layer=%d reason=%s", index, error)
            packed.append(None)
    for first, run in _runs(packed, traces):
        layers[first] = LayerRun(library, run)
    return sum(layer is not None for layer in packed)


@torch.inference_mode()
def replace_head(module: Any, library: NativeLibrary) -> None:  # noqa: ANN401
    """Pack the output embedding, if it is a plain linear map."""
    head = module.get_output_embeddings()
    if type(head) is nn.Linear and fits(head.in_features, head.weight.dtype):
        for name, child in module.named_children():
            if child is head:
                setattr(module, name, PackedHead(library, head))


def _decoder_layers(module: nn.Module, count: int) -> nn.ModuleList | None:
    for child in module.modules():
        if (
            isinstance(child, nn.ModuleList)
            and len(child) == count
            and all(hasattr(layer, "self_attn") for layer in child)
        ):
            return child
    return None


def _runs(
    packed: list[PackedLayer | None], traces: list[LayerTrace]
) -> Iterable[tuple[int, list[PackedLayer]]]:
    """Return (first layer, layers) of each longest run whose layers rotate by the same angles."""
    runs: list[tuple[int, list[PackedLayer]]] = []
    angles: object = None
    for index, layer in enumerate(packed):
        own = traces[index].kwargs.get("position_embeddings", (None,))[0]
        if layer is None:
            angles = None
        elif angles is not None and own is angles:
            runs[-1][1].append(layer)
        else:
            runs.append((index, [layer]))
            angles = own
    return runs


def _packed_layer(
    library: NativeLibrary, layer: nn.Module, trace: LayerTrace, trial: "_Trial", index: int
) -> PackedLayer:
    if "position_embeddings" not in trace.kwargs or not getattr(layer, "use_rope", True):
        raise UnrecognisedLayerError("no rotary embedding")
    packed = PackedLayer(library, read_layer(layer), trace, trial.layout, index)
    packed.attention_type = getattr(layer, "attention_type", None)
    error = trial.difference(LayerRun(library, [packed]), layer, trace, library)
    if not error < TOLERANCES[trial.dtype]:
        raise UnrecognisedLayerError(f"the compiled layer differs by {error:.1e}")
    return packed


class _Recorder(ReferenceAttention):
    """Reference attention that notes what each layer's module asks for."""

    def __init__(self, plan: ForwardPlan, pool: KVPool) -> None:
        super().__init__(plan, pool)
        self.calls: dict[int, dict[str, Any]] = {}

    def attend(self, layer: int, query: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:  # noqa: ANN401
        self.calls[layer] = {"num_heads": query.shape[1], **kwargs}
        return super().attend(layer, query, *args, **kwargs)


class _Trial:
    """A small batch on pools of its own, to run an original layer and its replacement on."""

    def __init__(self, layout: KVLayout, dtype: torch.dtype) -> None:
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
                num_heads=call["num_heads"],
                scaling=call["scaling"],
                softcap=call["softcap"],
                sinks=call["sinks"],
            )
            for kwargs, (_, call) in zip(seen, sorted(recorder.calls.items()), strict=True)
        ]

    def difference(
        self, compiled: LayerRun, original: nn.Module, trace: LayerTrace, library: NativeLibrary
    ) -> float:
        """Return how far the compiled layer is from the original in float32, relative."""
        generator = torch.Generator().manual_seed(0)
        hidden = compiled.hidden_size
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
