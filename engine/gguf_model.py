"""Turns a llama-architecture GGUF file into a folder that any ``transformers`` program can load.

Weights are dequantised once and rounded once, to bfloat16: from then on the folder is the model,
for Sluice and for whatever it is compared with.
"""

import logging
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, LlamaConfig, PreTrainedTokenizerFast

from core.errors import ConfigError

log = logging.getLogger(__name__)

CONTROL_TOKEN = 3
USER_DEFINED_TOKEN = 4

_OUTER_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def convert_gguf(gguf_path: Path, target: Path) -> None:
    """Write the model of ``gguf_path`` to ``target``: config, tokenizer, bfloat16 safetensors.

    ``target`` appears complete or not at all; one that exists is left as it is.

    Raises:
        ConfigError: the file cannot be read or is not a llama-architecture model whose tokenizer
            is a byte-level BPE.
    """
    if target.exists():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        _write_model(_open(gguf_path), gguf_path, staging)
        staging.chmod(0o755)
        try:
            staging.rename(target)
        except OSError:
            if not target.exists():
                raise
            log.info("gguf conversion_lost_race target=%s", target)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _open(gguf_path: Path) -> gguf.GGUFReader:
    try:
        return gguf.GGUFReader(gguf_path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"model file {gguf_path}: not a readable GGUF file: {error}") from error


def _write_model(reader: gguf.GGUFReader, source: Path, folder: Path) -> None:
    field = _field_reader(reader, source)
    architecture, tokenizer = field("general.architecture"), field("tokenizer.ggml.model")
    if architecture != "llama" or tokenizer != "gpt2":
        raise ConfigError(
            f"model file {source}: architecture {architecture!r} with tokenizer {tokenizer!r} "
            "cannot be converted (only 'llama' with 'gpt2'); use a safetensors folder instead"
        )
    weights = dict(
        _weights(
            reader,
            num_heads=field("llama.attention.head_count"),
            num_kv_heads=field("llama.attention.head_count_kv"),
        )
    )
    config = _config(field, tied="lm_head.weight" not in weights)
    config.save_pretrained(folder)
    GenerationConfig(
        bos_token_id=config.bos_token_id,
        eos_token_id=config.eos_token_id,
        pad_token_id=config.pad_token_id,
    ).save_pretrained(folder)
    _tokenizer(field).save_pretrained(folder)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _field_reader(reader: gguf.GGUFReader, source: Path) -> Callable[[str], Any]:
    def field(name: str) -> Any:  # noqa: ANN401  # GGUF fields are of any type
        value = reader.get_field(name)
        if value is None:
            raise ConfigError(f"model file {source}: field {name} is missing")
        return value.contents()

    return field


def _config(field: Callable[[str], Any], *, tied: bool) -> LlamaConfig:
    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        dtype="bfloat16",
        vocab_size=len(field("tokenizer.ggml.tokens")),
        hidden_size=field("llama.embedding_length"),
        intermediate_size=field("llama.feed_forward_length"),
        num_hidden_layers=field("llama.block_count"),
        num_attention_heads=field("llama.attention.head_count"),
        num_key_value_heads=field("llama.attention.head_count_kv"),
        head_dim=field("llama.rope.dimension_count"),
        max_position_embeddings=field("llama.context_length"),
        # The file holds float32; its shortest decimal is the value that was written (1e-05).
        rms_norm_eps=float(str(np.float32(field("llama.attention.layer_norm_rms_epsilon")))),
        rope_parameters={"rope_type": "default", "rope_theta": field("llama.rope.freq_base")},
        tie_word_embeddings=tied,
        bos_token_id=field("tokenizer.ggml.bos_token_id"),
        eos_token_id=field("tokenizer.ggml.eos_token_id"),
        pad_token_id=field("tokenizer.ggml.padding_token_id"),
    )


def _weights(
    reader: gguf.GGUFReader, *, num_heads: int, num_kv_heads: int
) -> Iterator[tuple[str, torch.Tensor]]:
    for tensor in reader.tensors:
        values: NDArray[np.float32] = gguf.dequantize(tensor.data, tensor.tensor_type)
        name = _name(tensor.name)
        if name.endswith("q_proj.weight"):
            values = _half_split_rows(values, num_heads)
        elif name.endswith("k_proj.weight"):
            values = _half_split_rows(values, num_kv_heads)
        yield name, torch.tensor(np.ascontiguousarray(values)).to(torch.bfloat16)


def _name(gguf_name: str) -> str:
    parts = gguf_name.split(".")
    if parts[0] == "blk":
        _, layer, part, kind = parts
        return f"model.layers.{layer}.{_LAYER_NAMES[part]}.{kind}"
    part, kind = parts
    return f"{_OUTER_NAMES[part]}.{kind}"


def _half_split_rows(values: NDArray[np.float32], num_heads: int) -> NDArray[np.float32]:
    # GGUF interleaves the rotary halves of each head; transformers keeps them one after the other.
    half = values.shape[0] // num_heads // 2
    return values.reshape(num_heads, half, 2, -1).swapaxes(1, 2).reshape(values.shape)


def _tokenizer(field: Callable[[str], Any]) -> PreTrainedTokenizerFast:
    tokens: list[str] = field("tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ", 1)) for merge in field("tokenizer.ggml.merges")]
    tokenizer = Tokenizer(
        models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges)
    )
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = (
        pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
        if field("tokenizer.ggml.pre") == "smollm"
        else byte_level
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds: list[int] = field("tokenizer.ggml.token_type")
    tokenizer.add_special_tokens(
        [
            AddedToken(token, normalized=False, special=True)
            for token, kind in zip(tokens, kinds, strict=True)
            if kind in (CONTROL_TOKEN, USER_DEFINED_TOKEN)
        ]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=tokens[field("tokenizer.ggml.bos_token_id")],
        eos_token=tokens[field("tokenizer.ggml.eos_token_id")],
        unk_token=tokens[field("tokenizer.ggml.unknown_token_id")],
        pad_token=tokens[field("tokenizer.ggml.padding_token_id")],
        model_max_length=field("llama.context_length"),
        clean_up_tokenization_spaces=False,
        chat_template=field("tokenizer.chat_template"),
    )
