"""Guards start-up: a model that cannot be served must stop it with one line that names the fix."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    BertConfig,
    BertLMHeadModel,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
)

from core.errors import ConfigError, RequestError
from engine.loading import LoadedModel, load_model
from tests.engine.tiny_models import WINDOW, make_tiny_model


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("llama", tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture
def folder(llama: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(llama, tmp_path / "model"))


def load(path: Path, **options: Any) -> LoadedModel:
    options = {"num_threads": 1} | options
    return load_model(path, dtype="float32", device="cpu", attention="reference", **options)


def test_spec_holds_what_the_config_and_the_layers_say(llama: Path) -> None:
    spec = load(llama).spec

    assert (spec.vocab_size, spec.eos_token_ids, spec.max_model_len) == (512, (2,), 2048)
    layout = spec.kv_layout(8)
    assert (layout.num_kv_heads, layout.head_dim, layout.layers_per_group) == (2, 16, 4)


@pytest.mark.parametrize("stray", [-1, 512])
def test_a_token_id_that_the_model_lacks_is_named(llama: Path, stray: int) -> None:
    spec = load(llama).spec
    spec.check_tokens((0, 511))
    with pytest.raises(RequestError, match=f"token id {stray}, the model has 0 to 511") as caught:
        spec.check_tokens((7, stray, 8))
    assert caught.value.field == "prompt"


@pytest.mark.parametrize(
    ("family", "windows"),
    [
        ("mistral", [WINDOW] * 4),
        ("gpt_oss", [WINDOW, None] * 2),
        ("gemma2", [WINDOW, None] * 2),
        ("gemma3", [WINDOW] * 5 + [None]),
    ],
)
def test_each_layer_has_the_window_of_its_mask(
    tmp_path: Path, family: str, windows: list[int | None]
) -> None:
    spec = load(make_tiny_model(family, tmp_path / family)).spec

    assert [layer.window for layer in spec.layers] == windows


def test_generation_config_has_the_last_word_on_eos(folder: Path) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 3]}))

    assert load(folder).spec.eos_token_ids == (2, 3)


def test_fingerprints_change_with_weights_config_and_tokenizer(folder: Path) -> None:
    before = load(folder).spec
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.3.mlp.down_proj.weight"][0, 0] += 1
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with (folder / "tokenizer.json").open("a") as file:
        file.write("\n")
    after = load(folder).spec

    assert before.fingerprint != after.fingerprint
    assert before.tokenizer_fingerprint != after.tokenizer_fingerprint


def test_fingerprint_is_the_same_for_a_copy(llama: Path, folder: Path) -> None:
    assert load(llama).spec.fingerprint == load(folder).spec.fingerprint


def test_wanted_length_is_held_against_the_model(llama: Path) -> None:
    assert load(llama, max_model_len=100).spec.max_model_len == 100
    with pytest.raises(ConfigError, match=r"max_model_len=4096.*at most 2048"):
        load(llama, max_model_len=4096)


def test_lengths_that_rescale_the_rotary_embedding_are_not_offered(folder: Path) -> None:
    """Past its trained length such a model's text depends on what else is in the batch."""
    config = json.loads((folder / "config.json").read_text())
    config["rope_parameters"] = {
        "rope_type": "dynamic",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 512,
    }
    (folder / "config.json").write_text(json.dumps(config))

    assert load(folder).spec.max_model_len == 512


def test_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere: no such folder"):
        load(tmp_path / "nowhere")


def test_missing_config_is_named(folder: Path) -> None:
    (folder / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"config\.json is missing"):
        load(folder)


@pytest.mark.parametrize("content", ["{", "{}", '{"model_type": "no-such-model"}', "[]"])
def test_broken_config_is_named(folder: Path, content: str) -> None:
    (folder / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=r"config\.json cannot be used"):
        load(folder)


def test_folder_without_safetensors_is_named(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"no \*\.safetensors file; convert"):
        load(folder)


def test_damaged_safetensors_are_named(folder: Path) -> None:
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[: len(content) // 2])
    with pytest.raises(ConfigError, match=str(folder)):
        load(folder)


def test_missing_tensors_are_named(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"lack 1 tensors.*layers\.1\.mlp\.up_proj"):
        load(folder)


def _deepseek() -> PreTrainedModel:
    return DeepseekV3ForCausalLM(
        DeepseekV3Config(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=32,
            moe_intermediate_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            n_routed_experts=4,
            num_experts_per_tok=2,
            n_group=1,
            topk_group=1,
            kv_lora_rank=8,
            q_lora_rank=8,
            qk_rope_head_dim=8,
            qk_nope_head_dim=8,
            v_head_dim=8,
        )
    )


def _mamba() -> PreTrainedModel:
    return MambaForCausalLM(MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2))


def _bert() -> PreTrainedModel:
    return BertLMHeadModel(
        BertConfig(
            vocab_size=64,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=32,
        )
    )


def _t5() -> PreTrainedModel:
    return T5ForConditionalGeneration(
        T5Config(vocab_size=64, d_model=32, d_ff=32, d_kv=16, num_layers=1, num_heads=2)
    )


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (_deepseek, "keys of 16 and values of 8"),
        (_mamba, "linear_attention"),
        (_bert, "neither causal"),
        (_t5, "encoder-decoder"),
    ],
)
def test_models_that_cannot_be_served_are_refused_with_the_reason(
    tmp_path: Path, make: Any, reason: str
) -> None:
    make().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=reason):
        load(tmp_path)


def test_weights_are_loaded_in_the_wanted_dtype(llama: Path) -> None:
    loaded = load_model(llama, dtype="bfloat16", device="cpu", attention="reference")

    assert {parameter.dtype for parameter in loaded.module.parameters()} == {torch.bfloat16}
