"""The seam to ``transformers``: its attention modules hand Q, K and V to the step's own object.

Every model family calls a registered function; ours passes on to the ``paged`` keyword argument of
the forward, so that nothing about a step is global.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface

from core.kv_layout import KVLayout

ATTENTION_NAME = "sluice_paged"

MaskPredicate = Callable[[int, int, torch.Tensor, torch.Tensor], torch.Tensor]
"""(batch, head, query positions, key positions) -> which pairs are visible."""


class PagedAttention(Protocol):
    """What a step puts behind the attention of every layer."""

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
        window: int | None,
    ) -> torch.Tensor:
        """Keep the step's keys and values, then return attention over all kept ones.

        Shapes: query [T, heads, head_dim], key and value [T, kv_heads, head_dim], result as query.
        ``sinks`` [heads] are logits that take part in the softmax without a value. ``window`` is
        what the module states; a step goes by the layer's spec.
        """
        ...


class MaskObserver(Protocol):
    """What the probe of a model puts in the config's way of making masks."""

    def observe_mask(self, predicate: MaskPredicate) -> None:
        """Note that the model asked for a mask of this kind."""
        ...


def register() -> None:
    """Make ``ATTENTION_NAME`` an attention implementation of ``transformers``; idempotent."""
    AttentionInterface.register(ATTENTION_NAME, _attention)
    AttentionMaskInterface.register(ATTENTION_NAME, _mask)


def _attention(  # noqa: PLR0913  # transformers' signature
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,  # noqa: ARG001
    scaling: float | None = None,
    dropout: float = 0.0,  # noqa: ARG001  # zero at inference
    *,
    paged: PagedAttention,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    sliding_window: int | None = None,
    **_kwargs: Any,  # noqa: ANN401  # transformers adds names over time
) -> tuple[torch.Tensor, None]:
    layer: Any = module.layer_idx
    output = paged.attend(
        layer,
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
        softcap=softcap,
        sinks=s_aux,
        window=sliding_window,
    )
    return output.unsqueeze(0), None


def _mask(*, mask_function: MaskPredicate, config: Any, **_kwargs: Any) -> None:  # noqa: ANN401
    observer: MaskObserver | None = getattr(config, "sluice_mask_observer", None)
    if observer is not None:
        observer.observe_mask(mask_function)


@dataclass(frozen=True, slots=True)
class LayerPart:
    """KV heads of one layer that are in one KV group."""

    group: int
    place: int
    """Of the layer in the group's blocks."""
    heads: Sequence[int]
    """By their place in the group's blocks."""


def layer_parts(layout: KVLayout) -> tuple[tuple[LayerPart, ...], ...]:
    """Return for each layer where its KV heads are; together the parts have each head once."""
    parts: list[list[LayerPart]] = [[] for _ in range(layout.num_layers)]
    for at, group in enumerate(layout.groups):
        for place, layer in enumerate(group.layers):
            parts[layer].append(LayerPart(group=at, place=place, heads=layout.heads_of(group)))
    return tuple(tuple(of_layer) for of_layer in parts)
