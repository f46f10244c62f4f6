"""Reads a decoder layer of ``transformers`` by its structure, whatever family it comes from.

Recognised: root-mean-square norms before (and, if there, after) attention and MLP, separate or
merged Q K V and gate/up projections, head norms, half-split rotary embedding, SiLU or tanh-GELU.
Anything else in a layer, one unknown parameter included, makes it unrecognised; what is read here
is not trusted but compared with the layer itself (``engine.native_layers``).
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

SILU, GELU_TANH = 0, 1


class UnrecognisedLayerError(Exception):
    """The layer is left to ``transformers``, for the reason in the message. Stays inside engine."""


@dataclass(frozen=True, slots=True)
class RMSNorm:
    """x / sqrt(mean(x^2) + epsilon) * weight, the weight float32 with any offset applied."""

    weight: torch.Tensor
    epsilon: float


@dataclass(frozen=True, slots=True)
class Projection:
    """A linear map; rows of ``weight`` are output columns."""

    weight: torch.Tensor
    bias: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """What a recognised layer computes with."""

    before_attention: RMSNorm
    after_attention: RMSNorm | None
    before_mlp: RMSNorm
    after_mlp: RMSNorm | None
    query_norm: RMSNorm | None
    key_norm: RMSNorm | None
    qkv: Projection
    output: Projection
    gate_up: Projection
    """Gate rows, then as many up rows."""
    down: Projection
    activation: int


def decoder_layers(module: nn.Module, count: int) -> nn.ModuleList | None:
    """Return the ``count`` layers of a model, in their order; None: there is no such list."""
    for child in module.modules():
        if (
            isinstance(child, nn.ModuleList)
            and len(child) == count
            and all(hasattr(layer, "self_attn") for layer in child)
        ):
            return child
    return None


def read_layer(layer: nn.Module) -> DecoderLayer:
    """Return the parts of ``layer``.

    Raises:
        UnrecognisedLayerError: the layer has other parts, or parts of another kind.
    """
    reader = _Reader(layer)
    sandwich = reader.has("pre_feedforward_layernorm")
    parts = DecoderLayer(
        before_attention=reader.norm("input_layernorm"),
        after_attention=reader.norm("post_attention_layernorm") if sandwich else None,
        before_mlp=reader.norm(
            "pre_feedforward_layernorm" if sandwich else "post_attention_layernorm"
        ),
        after_mlp=reader.norm("post_feedforward_layernorm") if sandwich else None,
        query_norm=reader.optional_norm("self_attn.q_norm"),
        key_norm=reader.optional_norm("self_attn.k_norm"),
        qkv=reader.projection(
            merged="self_attn.qkv_proj",
            separate=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        ),
        output=reader.projection(separate=("self_attn.o_proj",)),
        gate_up=reader.projection(
            merged="mlp.gate_up_proj", separate=("mlp.gate_proj", "mlp.up_proj")
        ),
        down=reader.projection(separate=("mlp.down_proj",)),
        activation=_activation(reader.module("mlp")),
    )
    reader.refuse_leftovers()
    return parts


class _Reader:
    """Takes parts of a layer by name and remembers which parameters they account for."""

    def __init__(self, layer: nn.Module) -> None:
        self._modules = dict(layer.named_modules())
        self._left = {name for name, _ in layer.named_parameters()}

    def has(self, name: str) -> bool:
        return name in self._modules

    def module(self, name: str) -> nn.Module:
        if name not in self._modules:
            raise UnrecognisedLayerError(f"no {name}")
        return self._modules[name]

    def optional_norm(self, name: str) -> RMSNorm | None:
        return self.norm(name) if self.has(name) else None

    def norm(self, name: str) -> RMSNorm:
        module = self.module(name)
        self._left.discard(f"{name}.weight")
        return _read_norm(module, name)

    def projection(self, *, separate: tuple[str, ...], merged: str | None = None) -> Projection:
        names = (merged,) if merged is not None and self.has(merged) else separate
        linears = [self._linear(name) for name in names]
        weight = torch.cat([linear.weight.detach() for linear in linears])
        if all(linear.bias is None for linear in linears):
            return Projection(weight, None)
        biases = [
            weight.new_zeros(linear.out_features) if linear.bias is None else linear.bias.detach()
            for linear in linears
        ]
        return Projection(weight, torch.cat(biases))

    def _linear(self, name: str) -> nn.Linear:
        module = self.module(name)
        if type(module) is not nn.Linear:
            raise UnrecognisedLayerError(f"{name} is a {type(module).__name__}")
        self._left -= {f"{name}.weight", f"{name}.bias"}
        return module

    def refuse_leftovers(self) -> None:
        if self._left:
            raise UnrecognisedLayerError(f"unknown parameter {min(self._left)}")


def _read_norm(module: nn.Module, name: str) -> RMSNorm:
    weight: Any = getattr(module, "weight", None)
    epsilon: Any = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if weight is None or weight.ndim != 1 or not isinstance(epsilon, float):
        raise UnrecognisedLayerError(f"{name} is a {type(module).__name__}")
    exact = copy.deepcopy(module).float()
    ones = torch.ones(weight.shape[0])
    # Some families keep the weight minus one: take what the module does with ones.
    effective: torch.Tensor = exact(ones) * (1 + epsilon) ** 0.5
    sample = torch.linspace(-1, 2, weight.shape[0])
    ours = sample * torch.rsqrt(sample.square().mean() + epsilon) * effective
    if not torch.allclose(exact(sample), ours, rtol=1e-4, atol=1e-5):
        raise UnrecognisedLayerError(f"{name} is not a root-mean-square norm")
    return RMSNorm(effective, epsilon)


def _activation(mlp: nn.Module) -> int:
    function: Any = getattr(mlp, "act_fn", getattr(mlp, "activation_fn", None))
    sample = torch.linspace(-6, 6, 101)
    known: dict[int, Callable[[torch.Tensor], torch.Tensor]] = {
        SILU: nn.functional.silu,
        GELU_TANH: lambda x: nn.functional.gelu(x, approximate="tanh"),
    }
    for code, ours in known.items():
        if function is not None and torch.allclose(function(sample), ours(sample), atol=1e-6):
            return code
    raise UnrecognisedLayerError(f"activation {function}")
