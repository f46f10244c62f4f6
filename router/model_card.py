"""What the router must know of the served model, read once from its folder."""

import hashlib
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from core.errors import ConfigError
from router.chat_template import ChatTemplate, read_chat_template, read_json
from router.tokenizer import Tokenizer, eos_token_ids


@dataclass(frozen=True, slots=True)
class ModelCard:
    """Name, limits, tokenizer and chat template of the served model."""

    name: str
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    """None: the model has none, and chat completions are refused."""
    eos_token_ids: tuple[int, ...]
    vocab_size: int
    max_model_len: int
    """Prompt and output tokens of one request, before what the workers report."""
    created: int
    """Unix seconds."""
    fingerprint: str
    """``system_fingerprint`` of the API: changes with the model's configuration."""

    @property
    def probe_token_id(self) -> int:
        """A token that every model takes as a prompt."""
        return next(iter(self.tokenizer.encode("Hi", add_special_tokens=True)), 0)

    @classmethod
    def load(cls, model_path: Path, *, name: str, max_model_len: int | None) -> "ModelCard":
        """Return the card of the model in ``model_path``.

        Args:
            model_path: folder with ``config.json`` and ``tokenizer.json``.
            name: in the API.
            max_model_len: the operator's limit; by default what the model's config allows.

        Raises:
            ConfigError: a file is missing or broken.
        """
        config = read_json(model_path / "config.json")
        if not config:
            raise ConfigError(f"model folder {model_path}: no config.json")
        text_config: dict[str, Any] = config.get("text_config") or config
        tokenizer = Tokenizer.load(model_path)
        limit = text_config.get("max_position_embeddings")
        if max_model_len is None and not isinstance(limit, int):
            raise ConfigError(
                f"{model_path}/config.json: no max_position_embeddings; set model.max_model_len"
            )
        generation_config = read_json(model_path / "generation_config.json")
        return cls(
            name=name,
            tokenizer=tokenizer,
            chat_template=read_chat_template(model_path),
            eos_token_ids=eos_token_ids([generation_config, text_config, config]),
            vocab_size=int(text_config.get("vocab_size") or tokenizer.vocab_size),
            max_model_len=max_model_len or int(limit or 0),
            created=int(time.time()),
            fingerprint=f"fp_{_digest(model_path / 'config.json', model_path / 'tokenizer.json')}",
        )


def _digest(*files: Path) -> str:
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()[:10]
