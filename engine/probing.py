"""Finds out what a model's layers keep per token by running it once, instead of knowing families.

Masks are asked for the exact span, because configs count windows in different ways and two
implementations that disagree by one token agree on every short prompt.
"""

from typing import Any

import torch
from transformers import PreTrainedModel

from core.errors import ConfigError
from core.kv_layout import LayerSpec
from engine.attention import MaskPredicate

PROBE_TOKENS = 3


class LayerProbe:
    """Stands in for a step's attention, and notes what each layer asks for."""

    def __init__(self) -> None:
        self.layers: dict[int, LayerSpec] = {}
        self.masks: list[MaskPredicate] = []
        self.problems: list[str] = []

    def observe_mask(self, predicate: MaskPredicate) -> None:
        """Note that the model asked for a mask of this kind."""
        self.masks.append(predicate)

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scaling: float,  # noqa: ARG002
        softcap: float | None,  # noqa: ARG002
        sinks: torch.Tensor | None,  # noqa: ARG002
        window: int | None,
    ) -> torch.Tensor:
        """See ``PagedAttention.attend``; the result is of the right shape only."""
        _, num_kv_heads, head_dim = key.shape
        if value.shape[-1] != head_dim:
            self.problems.append(
                f"layer {layer} has keys of {head_dim} and values of {value.shape[-1]} numbers"
            )
        if layer in self.layers:
            self.problems.append(f"layer {layer} attends more than once")
        self.layers[layer] = LayerSpec(num_kv_heads=num_kv_heads, head_dim=head_dim, window=window)
        return query.new_zeros(*query.shape[:2], value.shape[-1])


@torch.inference_mode()
def probe_layers(model: PreTrainedModel, config: Any, *, name: str) -> tuple[LayerSpec, ...]:  # noqa: ANN401
    """Return the spec of each attention layer of ``model``, in order.

    Raises:
        ConfigError: a layer is recurrent, shares another's KV, has keys and values of different
            size, or masks in a way that is neither causal nor a causal sliding window.
    """
    probe = LayerProbe()
    tokens = torch.zeros(1, PROBE_TOKENS, dtype=torch.long, device=model.device)
    positions = torch.arange(PROBE_TOKENS, device=model.device)[None]
    config.sluice_mask_observer = probe
    try:
        model(input_ids=tokens, position_ids=positions, use_cache=False, paged=probe)
    except (TypeError, KeyError, AttributeError, RuntimeError, ValueError) as error:
        raise ConfigError(
            f"model {name}: its attention cannot be replaced ({error}); "
            "use a decoder model whose transformers class supports attention backends"
        ) from error
    finally:
        del config.sluice_mask_observer
    _check_layers(probe, config, name=name)
    _check_masks(probe, name=name)
    return tuple(probe.layers[layer] for layer in range(len(probe.layers)))


def _check_layers(probe: LayerProbe, config: Any, *, name: str) -> None:  # noqa: ANN401
    num_layers: int = config.num_hidden_layers
    if num_shared := getattr(config, "num_kv_shared_layers", 0):
        probe.problems.append(f"{num_shared} layers share the KV of other layers")
    missing = sorted(set(range(num_layers)) - probe.layers.keys())
    if missing:
        kinds = getattr(config, "layer_types", None)
        what = f"{kinds[missing[0]]!r}" if kinds else "of a kind without paged attention"
        probe.problems.append(f"layers {missing} are {what}")
    if probe.problems:
        raise ConfigError(
            f"model {name}: {'; '.join(probe.problems)}; this is not supported, "
            "use a decoder model whose layers all keep their own keys and values of one size"
        )


def _check_masks(probe: LayerProbe, *, name: str) -> None:
    stated = {layer.window for layer in probe.layers.values()}
    for predicate in probe.masks:
        fits = [window for window in stated if _is_causal(predicate, window)]
        if not fits:
            raise ConfigError(
                f"model {name}: it masks attention in a way that is neither causal nor one of its "
                f"sliding windows {sorted(window for window in stated if window)}; "
                "use a decoder-only model"
            )


def _is_causal(predicate: MaskPredicate, window: int | None) -> bool:
    """Return whether a query sees exactly itself and the ``window`` - 1 tokens before it."""
    reach = window or 1_000_000
    query = 3 * reach
    distances = [-1, 0, 1, reach // 2, reach - 1, reach, reach + 1, query]
    seen = predicate(0, 0, torch.tensor(query), query - torch.tensor(distances))
    wanted = [0 <= distance < (reach if window else query + 1) for distance in distances]
    return torch.broadcast_to(seen, (len(distances),)).tolist() == wanted
