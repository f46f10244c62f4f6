"""Guards the conversion of the default model: a wrong permutation of heads still gives text."""

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from core.errors import ConfigError
from engine.gguf_model import convert_gguf
from tests.engine.tiny_models import make_tiny_model

GGUF_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    if name == "model.embed_tokens.weight":
        return "token_embd.weight"
    if name == "model.norm.weight":
        return "output_norm.weight"
    _, _, layer, part = name.removesuffix(".weight").split(".", 3)
    return f"blk.{layer}.{GGUF_NAMES[part]}.weight"


def interleaved(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Do what llama.cpp's converter does to the rows of Q and K."""
    half = weight.shape[0] // num_heads // 2
    return weight.reshape(num_heads, 2, half, -1).swapaxes(1, 2).reshape(weight.shape)


def write_gguf(folder: Path, path: Path, *, architecture: str = "llama") -> None:
    """Write the tiny Llama of ``folder`` as a GGUF file."""
    model: LlamaForCausalLM = AutoModelForCausalLM.from_pretrained(folder)
    config = model.config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    added = {token["id"]: token for token in tokenizer["added_tokens"]}
    vocab = tokenizer["model"]["vocab"] | {token["content"]: at for at, token in added.items()}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(sorted(vocab, key=vocab.__getitem__))
    writer.add_token_types([3 if at in added else 1 for at in range(len(vocab))])
    writer.add_token_merges([" ".join(pair) for pair in tokenizer["model"]["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    writer.add_unk_token_id(0)
    writer.add_chat_template("{{ messages[0]['content'] }}")
    for name, tensor in model.named_parameters():
        values = tensor.detach().numpy()
        if "q_proj" in name:
            values = interleaved(values, config.num_attention_heads)
        elif "k_proj" in name:
            values = interleaved(values, config.num_key_value_heads)
        writer.add_tensor(gguf_name(name), np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_converted_folder_is_the_model_rounded_once(tmp_path: Path) -> None:
    folder = make_tiny_model("llama", tmp_path / "llama")
    write_gguf(folder, tmp_path / "model.gguf")

    convert_gguf(tmp_path / "model.gguf", tmp_path / "converted")

    original = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    converted = AutoModelForCausalLM.from_pretrained(tmp_path / "converted", dtype=torch.float32)
    assert converted.config.rms_norm_eps == 1e-6
    assert converted.generation_config.eos_token_id == 2
    for name, tensor in converted.state_dict().items():
        assert torch.equal(tensor, original[name].bfloat16().float()), name


def test_converted_tokenizer_splits_digits_and_knows_special_tokens(tmp_path: Path) -> None:
    folder = make_tiny_model("llama", tmp_path / "llama")
    write_gguf(folder, tmp_path / "model.gguf")

    convert_gguf(tmp_path / "model.gguf", tmp_path / "converted")

    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "converted")
    assert tokenizer("<|bos|>").input_ids == [1]
    assert tokenizer.tokenize("a12")[-2:] == ["1", "2"]
    text = "Prices: 12,345 über 日本"
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert chat == "hi"


def test_target_that_exists_is_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "target").mkdir()

    convert_gguf(tmp_path / "no-file.gguf", tmp_path / "target")

    assert list((tmp_path / "target").iterdir()) == []


@pytest.mark.parametrize("content", [b"", b"not a model at all, but long enough to be read"])
def test_unreadable_file_is_refused_and_leaves_nothing(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.gguf").write_bytes(content)

    with pytest.raises(ConfigError, match=r"model\.gguf: not a readable GGUF file"):
        convert_gguf(tmp_path / "model.gguf", tmp_path / "out" / "target")

    assert list((tmp_path / "out").iterdir()) == []


def test_other_architectures_are_refused(tmp_path: Path) -> None:
    folder = make_tiny_model("llama", tmp_path / "llama")
    write_gguf(folder, tmp_path / "model.gguf", architecture="qwen2")

    with pytest.raises(ConfigError, match="architecture 'qwen2'"):
        convert_gguf(tmp_path / "model.gguf", tmp_path / "target")

    assert not (tmp_path / "target").exists()
