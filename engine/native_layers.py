"""Replaces decoder layers of a ``transformers`` model by compiled ones that give the same numbers.

Eager modules spend most of a small step between kernels. Each layer that is recognised is packed,
run beside the original on random input, and takes its place only if both agree; the original's
weights are freed at once, so that weights exist twice for one layer at most. Everything else, and
all that is around the layers, stays with ``transformers``.
"""

import logging
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from core.kv_layout import KVLayout
from engine.attention_native import NativeAttention, attention_structure
from engine.layer_progress import LayerProgress
from engine.layer_recognition import (
    DecoderLayer,
    Projection,
    RMSNorm,
    UnrecognisedLayerError,
    decoder_layers,
    read_layer,
)
from engine.layer_trial import LayerTrace, LayerTrial
from engine.native_library import (
    Layer,
    NativeLibrary,
    Norm,
    PackedMatrix,
    fits,
)

log = logging.getLogger(__name__)

HALF_PANEL = PackedMatrix.PANEL // 2
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
"""Of the difference's norm over the result's."""


class LayerRun(nn.Module):
    """Consecutive compiled layers, in one call."""

    reports_layers = True

    def __init__(
        self, library: NativeLibrary, layers: "list[PackedLayer]", *, first: int = 0
    ) -> None:
        super().__init__()
        self._library = library
        self._packed = layers
        self._indices = range(first, first + len(layers))
        self._structures = (Layer * len(layers))(*(layer.structure for layer in layers))
        self.attention_type = layers[0].attention_type

    def forward(
        self,
        hidden_states: torch.Tensor,
        *,
        paged: NativeAttention,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        layer_progress: LayerProgress | None = None,
        **_kwargs: Any,  # noqa: ANN401  # what transformers passes to its own layers
    ) -> torch.Tensor:
        """Return the residual stream [1, T, hidden] behind the layers."""
        cos, sin = (part.float().contiguous() for part in position_embeddings)
        paged.step.cos, paged.step.sin = cos.data_ptr(), sin.data_ptr()
        x = hidden_states.clone(memory_format=torch.contiguous_format)
        if layer_progress is None:
            self._library.run_layers(self._structures, paged.step, x[0])
            return x
        first = self._indices.start
        self._library.run_layers(
            self._structures,
            paged.step,
            x[0],
            marks=[mark - first for mark in layer_progress.marks_in(self._indices)],
            reached=lambda layer: layer_progress.complete(first + layer),
        )
        return x


class AbsorbedLayer(nn.Module):
    """The place of a layer that an earlier ``LayerRun`` has computed, and reported."""

    reports_layers = True

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
        self.keep_kv_in(layout, trace, index)

    def keep_kv_in(self, layout: KVLayout, trace: LayerTrace, index: int) -> None:
        """Have the layer, the ``index``-th of the model, find its KV in a pool of ``layout``."""
        self.structure.attention = attention_structure(
            layout,
            index,
            num_heads=trace.num_heads,
            scaling=trace.scaling,
            softcap=trace.softcap,
            sinks=self._sinks,
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
    layers = decoder_layers(module, layout.num_layers)
    if layers is None:
        return 0
    trial = LayerTrial(layout, module.dtype)
    traces = trial.trace(module, layers)
    packed: list[PackedLayer | None] = []
    for index, layer in enumerate(layers):
        try:
            replacement = _packed_layer(library, layer, traces[index], trial, index)
            replacement.keep_kv_in(layout, traces[index], index)
            packed.append(replacement)
            layers[index] = AbsorbedLayer(getattr(layer, "attention_type", None))
        except UnrecognisedLayerError as error:
            log.info("layer stays with transformers layer=%d reason=%s", index, error)
            packed.append(None)
    for first, run in _runs(packed, traces):
        layers[first] = LayerRun(library, run, first=first)
    return sum(layer is not None for layer in packed)


@torch.inference_mode()
def replace_head(module: Any, library: NativeLibrary) -> None:  # noqa: ANN401
    """Pack the output embedding, if it is a plain linear map."""
    head = module.get_output_embeddings()
    if type(head) is nn.Linear and fits(head.in_features, head.weight.dtype):
        for name, child in module.named_children():
            if child is head:
                setattr(module, name, PackedHead(library, head))


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
    library: NativeLibrary, layer: nn.Module, trace: LayerTrace, trial: LayerTrial, index: int
) -> PackedLayer:
    if "position_embeddings" not in trace.kwargs or not getattr(layer, "use_rope", True):
        raise UnrecognisedLayerError("no rotary embedding")
    packed = PackedLayer(library, read_layer(layer), trace, trial.layout, index)
    packed.attention_type = getattr(layer, "attention_type", None)
    error = trial.difference(LayerRun(library, [packed]), layer, trace, library=library)
    if not error < TOLERANCES[trial.dtype]:
        raise UnrecognisedLayerError(f"the compiled layer differs by {error:.1e}")
    return packed
