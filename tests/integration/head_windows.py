"""What a model says whose heads have windows: ``transformers`` with a dense mask per head."""

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from core.config import HeadWindowConfig
from core.kv_layout import KVLayout, LayerSpec
from engine.loading import load_model
from engine.model_spec import ModelSpec
from tests.engine.head_masks import visible_by_head


def spec_of(model_path: Path, window: HeadWindowConfig | None = None) -> ModelSpec:
    """Return what a worker knows of the model under this window."""
    return load_model(
        model_path,
        dtype="float32",
        device="cpu",
        attention="reference",
        num_threads=1,
        head_window=window,
    ).spec


def layout_of(model_path: Path, window: HeadWindowConfig | None = None) -> KVLayout:
    """Return the layout of a worker's pool with blocks of the usual size."""
    return spec_of(model_path, window).kv_layout(16)


@torch.inference_mode()
def generate_dense(
    model_path: Path, window: HeadWindowConfig, prompts: Sequence[list[int]], *, num_tokens: int
) -> list[list[int]]:
    """Return the greedy text behind each prompt, in float32 and without any cache."""
    torch.set_num_threads(1)
    reference: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        model_path, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    layers = spec_of(model_path, window).layers
    masks: list[torch.Tensor] = []
    for index, layer in enumerate(reference.model.layers):
        layer.self_attn.register_forward_pre_hook(
            lambda _module, args, kwargs, index=index: (
                args,
                {**kwargs, "attention_mask": masks[index]},
            ),
            with_kwargs=True,
        )
    outputs: list[list[int]] = []
    for prompt in prompts:
        tokens = [*prompt]
        for _ in range(num_tokens):
            masks[:] = _masks(layers, reference.config.num_attention_heads, len(tokens))
            logits = reference(torch.tensor([tokens]), use_cache=False).logits[0, -1]
            tokens.append(int(logits.argmax()))
        outputs.append(tokens[len(prompt) :])
    return outputs


def _masks(layers: Sequence[LayerSpec], num_heads: int, length: int) -> list[torch.Tensor]:
    made: list[torch.Tensor] = []
    for layer in layers:
        visible = visible_by_head(layer, length)
        visible = visible.repeat_interleave(num_heads // layer.num_kv_heads, dim=0)
        made.append(torch.where(visible, 0.0, torch.finfo(torch.float32).min)[None])
    return made
