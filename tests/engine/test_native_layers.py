"""Guards compiled layers: which layers they take over, and that a row never sees its neighbours."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, GraniteConfig, GraniteForCausalLM

from core.ids import Slot
from engine.batch import SequenceInput
from engine.forward import PagedModel
from engine.layer_recognition import UnrecognisedLayerError, read_layer
from engine.loading import load_model
from engine.native_layers import AbsorbedLayer, LayerRun
from engine.plan import build_plan
from tests.engine.tiny_models import make_tiny_model

BLOCK_SIZE = 8
PROMPT_LEN = 150
TABLE = np.random.default_rng(0).permutation(64).astype(np.int32)


def load(folder: Path, dtype: str = "float32", num_threads: int = 2) -> PagedModel:
    loaded = load_model(
        folder, dtype=dtype, device="cpu", attention="native", num_threads=num_threads
    )
    return PagedModel(loaded, block_size=BLOCK_SIZE, num_blocks=64)


def logits_in_chunks(model: PagedModel, token_ids: list[int], chunk: int) -> torch.Tensor:
    """Return the last token's logits; each group of the model has its own blocks."""
    groups = model.kv_pool.layout.groups
    tables = tuple(np.array_split(TABLE, len(groups)))
    logits = torch.empty(0)
    for first in range(0, len(token_ids), chunk):
        part = SequenceInput(
            slot=Slot(0),
            token_ids=token_ids[first : first + chunk],
            position=first,
            block_tables=tables,
            sample=True,
        )
        logits = model.forward(build_plan([part], model.kv_pool.layout, device=model.device))
    return logits


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma2", "gemma3", "mistral"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_layer_of_the_known_families_is_compiled(
    tmp_path: Path, family: str, dtype: str
) -> None:
    model = load(make_tiny_model(family, tmp_path / family), dtype)

    layers = model._module.model.layers
    assert {type(layer) for layer in layers} <= {LayerRun, AbsorbedLayer}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logits_do_not_depend_on_how_a_prompt_is_cut_into_chunks(
    tmp_path: Path, dtype: str
) -> None:
    """Bit for bit, so that prefill workers, decode workers and preemption give one text."""
    model = load(make_tiny_model("llama", tmp_path / "llama"), dtype)
    token_ids = np.random.default_rng(1).integers(3, 512, size=PROMPT_LEN).tolist()

    whole = logits_in_chunks(model, token_ids, PROMPT_LEN)

    for chunk in (1, 7, 64, 149):
        assert torch.equal(whole, logits_in_chunks(model, token_ids, chunk)), chunk


def test_logits_do_not_depend_on_the_number_of_threads(tmp_path: Path) -> None:
    folder = make_tiny_model("gemma3", tmp_path / "gemma3")
    token_ids = np.random.default_rng(1).integers(3, 512, size=60).tolist()

    one, three = (
        logits_in_chunks(load(folder, num_threads=count), token_ids, 60) for count in (1, 3)
    )

    assert torch.equal(one, three)


def test_a_layer_that_computes_otherwise_stays_with_transformers(tmp_path: Path) -> None:
    """Granite has Llama's parts to the last name, and scales what each part adds."""
    config = GraniteConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        residual_multiplier=0.5,
        initializer_range=0.2,
    )
    GraniteForCausalLM(config).save_pretrained(tmp_path)
    model = load(tmp_path)
    token_ids = np.random.default_rng(1).integers(3, 512, size=30).tolist()

    logits = logits_in_chunks(model, token_ids, 13)

    assert not any(isinstance(layer, LayerRun) for layer in model._module.model.layers)
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    with torch.inference_mode():
        expected = reference(torch.tensor([token_ids])).logits[0, -1:]
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


def test_a_layer_with_an_unknown_parameter_is_not_recognised(tmp_path: Path) -> None:
    folder = make_tiny_model("llama", tmp_path / "llama")
    layer = AutoModelForCausalLM.from_pretrained(folder).model.layers[0]
    read_layer(layer)
    layer.register_parameter("extra", nn.Parameter(torch.ones(1)))

    with pytest.raises(UnrecognisedLayerError, match="unknown parameter extra"):
        read_layer(layer)
