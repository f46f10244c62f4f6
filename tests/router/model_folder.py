"""A model folder with a real byte-level tokenizer, trained in a moment, and a chat template."""

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
EOS = 2
MAX_MODEL_LEN = 512
CORPUS = ["the quick brown fox jumps over the lazy dog", "hello world, this is a test of text"]


def make_model_folder(path: Path, *, chat_template: bool = True) -> Path:
    """Write config and tokenizer of a model without weights to ``path``."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.save(str(path / "tokenizer.json"))
    settings: dict[str, object] = {"eos_token": "<|im_end|>", "bos_token": "<|im_start|>"}
    if chat_template:
        settings["chat_template"] = CHAT_TEMPLATE
    config = {
        "vocab_size": tokenizer.get_vocab_size(),
        "max_position_embeddings": MAX_MODEL_LEN,
        "eos_token_id": 0,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    (path / "config.json").write_text(json.dumps(config))
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [EOS]}))
    return path
