"""What the rest of a worker needs to know of a model, and the hashes that peers compare."""

import hashlib
import json
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from core.errors import ConfigError, RequestError
from core.kv_layout import KVDtype, KVLayout, LayerSpec, group_layers

LEADING_NBYTES = 256
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "added_tokens.json",
)


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Facts about a loaded model."""

    vocab_size: int
    eos_token_ids: tuple[int, ...]
    max_model_len: int
    """Tokens of one sequence, prompt and output."""
    layers: tuple[LayerSpec, ...]
    dtype: KVDtype
    """Of weights, activations, and KV where nothing else is wanted for it."""
    fingerprint: str
    """Of config and weights: equal on two workers that may exchange KV."""
    tokenizer_fingerprint: str

    def has_tokens(self, token_ids: Sequence[int]) -> bool:
        """Whether every id is of this vocabulary; the engine would read past its embeddings."""
        return not token_ids or (min(token_ids) >= 0 and max(token_ids) < self.vocab_size)

    def check_tokens(self, token_ids: Sequence[int]) -> None:
        """Check the token ids of a prompt.

        Raises:
            RequestError: one is not of this vocabulary.
        """
        if not self.has_tokens(token_ids):
            last = self.vocab_size - 1
            stray = next(token_id for token_id in token_ids if not 0 <= token_id <= last)
            raise RequestError(
                f"prompt has token id {stray}, the model has 0 to {last}; send ids of this model's "
                "tokenizer, and text only through a router that has it",
                field="prompt",
            )

    def kv_layout(self, block_size: int, kv_dtype: Literal["auto"] | KVDtype = "auto") -> KVLayout:
        """Return the layout of this model's KV in blocks of ``block_size`` tokens.

        Raises:
            ConfigError: the layers' KV shapes differ, or do not allow ``kv_dtype``.
        """
        dtype = self.dtype if kv_dtype == "auto" else kv_dtype
        return group_layers(self.layers, block_size=block_size, dtype=dtype)


def model_fingerprint(folder: Path) -> str:
    """Return a hash of the config and of every tensor's name, type, shape and first bytes.

    Cheap (it reads a few KB per file), and different for any two trained revisions.

    Raises:
        ConfigError: a safetensors file is damaged.
    """
    digest = hashlib.sha256()
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config.pop("transformers_version", None)
    digest.update(json.dumps(config, sort_keys=True).encode())
    for path in sorted(folder.glob("*.safetensors")):
        for part in _tensor_prints(path):
            digest.update(part)
    return digest.hexdigest()[:32]


def tokenizer_fingerprint(folder: Path) -> str:
    """Return a hash of the files that decide how text becomes tokens; all absent is a value too."""
    digest = hashlib.sha256()
    for name in TOKENIZER_FILES:
        path = folder / name
        if path.is_file():
            digest.update(name.encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()[:32]


def _tensor_prints(path: Path) -> Iterator[bytes]:
    # Format: https://github.com/huggingface/safetensors#format
    try:
        with path.open("rb") as file:
            (header_nbytes,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(header_nbytes))
            data_start = 8 + header_nbytes
            for name in sorted(header.keys() - {"__metadata__"}):
                entry = header[name]
                begin, end = entry["data_offsets"]
                yield json.dumps([name, entry["dtype"], entry["shape"]]).encode()
                file.seek(data_start + begin)
                yield file.read(min(end - begin, LEADING_NBYTES))
    except (OSError, ValueError, KeyError, struct.error) as error:
        raise ConfigError(
            f"model file {path}: not a readable safetensors file ({error}); download it again"
        ) from error
