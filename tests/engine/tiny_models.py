"""Small randomly initialised models of several families, with a byte-level tokenizer, on disk.

The tokenizer's vocabulary is exactly the model's, so a folder can serve text end to end.
"""

from collections.abc import Callable
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCAB_SIZE = 512
PAD, BOS, EOS, TURN = "<|pad|>", "<|bos|>", "<|eos|>", "<|turn|>"
WINDOW = 24

_CORPUS = [
    "The quick brown fox jumps over the lazy dog while twelve wizards count prime numbers.",
    "A block is a fixed run of token slots; a sequence is a table of blocks in reading order.",
    "Rivers carry water to the sea, and the sea gives it back to the clouds above the hills.",
    "def add(left, right):\n    return left + right\n\nfor n in range(10):\n    print(n)\n",
]
_CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|turn|>{{ message['role'] }}\n"
    "{{ message['content'] }}{% endfor %}{% if add_generation_prompt %}<|turn|>assistant\n"
    "{% endif %}"
)
_COMMON = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    # Weights this large make attention matter: with the usual 0.02 every token looks alike.
    "initializer_range": 0.2,
}
_ALTERNATING = ["sliding_attention", "full_attention"] * 2


def _llama() -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(**_COMMON, tie_word_embeddings=True))


def _qwen2() -> PreTrainedModel:
    return Qwen2ForCausalLM(Qwen2Config(**_COMMON))


def _qwen3() -> PreTrainedModel:
    return Qwen3ForCausalLM(Qwen3Config(**_COMMON))


def _gemma2() -> PreTrainedModel:
    return Gemma2ForCausalLM(
        Gemma2Config(
            **_COMMON,
            sliding_window=WINDOW,
            layer_types=_ALTERNATING,
            query_pre_attn_scalar=24,
            attn_logit_softcapping=5.0,
            final_logit_softcapping=10.0,
        )
    )


def _gemma3() -> PreTrainedModel:
    return Gemma3ForCausalLM(
        Gemma3TextConfig(
            **{**_COMMON, "num_hidden_layers": 6},
            sliding_window=WINDOW,
            layer_types=["sliding_attention"] * 5 + ["full_attention"],
            query_pre_attn_scalar=16,
        )
    )


def _mistral() -> PreTrainedModel:
    return MistralForCausalLM(MistralConfig(**_COMMON, sliding_window=WINDOW))


def _gpt_oss() -> PreTrainedModel:
    return GptOssForCausalLM(
        GptOssConfig(
            **_COMMON,
            sliding_window=WINDOW,
            layer_types=_ALTERNATING,
            num_local_experts=4,
            num_experts_per_tok=2,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        )
    )


_FAMILIES: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "mistral": _mistral,
    "gpt_oss": _gpt_oss,
}
FAMILIES = tuple(_FAMILIES)


def make_tiny_model(family: str, path: Path, *, seed: int = 0) -> Path:
    """Write a model of ``family`` (one of ``FAMILIES``) and its tokenizer to ``path``; return it.

    The same seed gives the same weights. Sliding windows are ``WINDOW`` tokens.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = _FAMILIES[family]().eval()
        _randomize_flat_parameters(model)
    model.save_pretrained(path)
    _tokenizer().save_pretrained(path)
    return path


def _randomize_flat_parameters(model: PreTrainedModel) -> None:
    """Give norms, biases and sinks values that a dropped or misplaced one would show."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.2)
            elif name.endswith("bias") or "sinks" in name:
                parameter.copy_(torch.randn_like(parameter) * 0.5)


def _tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[PAD, BOS, EOS, TURN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
        min_frequency=1,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    missing = VOCAB_SIZE - tokenizer.get_vocab_size()
    tokenizer.add_tokens([AddedToken(f"<|unused{index}|>") for index in range(missing)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        clean_up_tokenization_spaces=False,
        chat_template=_CHAT_TEMPLATE,
    )
