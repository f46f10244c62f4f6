"""Which tokens each head of a layer may see, written out densely."""

import torch

from core.kv_layout import LayerSpec


def visible_by_head(layer: LayerSpec, length: int) -> torch.Tensor:
    """Return [kv_heads, queries, keys]."""
    query, key = torch.arange(length)[:, None], torch.arange(length)[None]
    by_head: list[torch.Tensor] = []
    for head in range(layer.num_kv_heads):
        window, num_sinks = layer.window, layer.num_sinks
        if layer.head_window is not None and head in layer.head_window.heads:
            window, num_sinks = layer.head_window.window, layer.head_window.num_sinks
        inside = key < length if window is None else (query - key < window) | (key < num_sinks)
        by_head.append((key <= query) & inside)
    return torch.stack(by_head)
