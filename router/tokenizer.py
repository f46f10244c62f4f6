"""Text to token ids and back, from a model folder, without torch or ``transformers``."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as HFTokenizer

from core.errors import ConfigError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_METASPACE = "\N{LOWER ONE EIGHTH BLOCK}"


class Tokenizer:
    """A model's tokenizer. Safe to call from several threads; ``encode`` releases the GIL."""

    def __init__(self, tokenizer: HFTokenizer) -> None:
        self._tokenizer = tokenizer
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        decoder = tokenizer.decoder
        self.is_byte_level = decoder is not None and "ByteLevel" in type(decoder).__name__
        """A token's text does not depend on the tokens before it."""
        self._added = {
            token_id: token.content
            for token_id, token in tokenizer.get_added_tokens_decoder().items()
        }
        vocab = tokenizer.get_vocab(with_added_tokens=True)
        self.longest_token_chars = max(map(len, vocab), default=1)
        self.vocab_size = max(vocab.values(), default=0) + 1

    @classmethod
    def load(cls, model_path: Path) -> "Tokenizer":
        """Return the tokenizer in ``model_path``.

        Raises:
            ConfigError: there is none, or it cannot be read.
        """
        file = model_path / "tokenizer.json"
        if not file.is_file():
            raise ConfigError(
                f"model folder {model_path}: no tokenizer.json; save one with "
                "transformers' AutoTokenizer.from_pretrained(...).save_pretrained(FOLDER)"
            )
        try:
            return cls(HFTokenizer.from_file(str(file)))
        except Exception as error:
            raise ConfigError(f"model folder {model_path}: bad tokenizer.json: {error}") from error

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Return the ids of ``text``; with the model's own first and last tokens if asked."""
        (encoding,) = self._tokenizer.encode_batch_fast(
            [text], add_special_tokens=add_special_tokens
        )
        return encoding.ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of ``token_ids`` without special tokens; U+FFFD for broken UTF-8."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=True)

    def token_bytes(self, token_id: int) -> bytes:
        """Return the UTF-8 bytes that one token stands for: perhaps a part of a character."""
        if (added := self._added.get(token_id)) is not None:
            return added.encode()
        token = self._tokenizer.id_to_token(token_id)
        if token is None:  # models have more rows than their tokenizer has entries
            return b""
        if self.is_byte_level:
            return b"".join(_BYTES_OF_CHAR.get(char, char.encode()) for char in token)
        if match := _BYTE_TOKEN.fullmatch(token):
            return bytes.fromhex(match[1])
        return token.replace(_METASPACE, " ").encode()


def _bytes_of_char() -> dict[str, bytes]:
    """Return GPT-2's map between bytes and printable characters, inverted."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    chars = {chr(byte): bytes([byte]) for byte in printable}
    return chars | {chr(256 + index): bytes([byte]) for index, byte in enumerate(others)}


_BYTES_OF_CHAR = _bytes_of_char()


def eos_token_ids(configs: Sequence[dict[str, Any]]) -> tuple[int, ...]:
    """Return the ids that end a sequence, from the first of ``configs`` that names any."""
    for config in configs:
        value = config.get("eos_token_id")
        if isinstance(value, int):
            return (value,)
        if isinstance(value, list) and value:
            return tuple(value)  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    return ()
