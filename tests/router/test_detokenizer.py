"""Streamed text must equal the text decoded at once, and never hold half a character.

A token may be one byte of an emoji; a Metaspace tokenizer drops the space before a text's first
word, which the first output token is not.
"""

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as HFTokenizer
from tokenizers import decoders, models, normalizers

from router.detokenizer import IncrementalDetokenizer
from router.tokenizer import Tokenizer

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
MULTILINGUAL = (
    "plain, na\u00efve, \u4f60\u597d\u4e16\u754c, \u0645\u0631\u062d\u0628\u0627, "
    "\U0001f468\u200d\U0001f469\u200d\U0001f467 \U0001f1ec\U0001f1ea e\u0301 \u20ac\n\t end"
)


def _pieces(tokenizer: Tokenizer, ids: list[int], prompt: tuple[int, ...] = ()) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer, prompt)
    return [*map(detokenizer.feed, ids), detokenizer.flush()]


@pytest.fixture(scope="session")
def byte_fallback_tokenizer() -> Tokenizer:
    """As Llama 2 and Gemma have it: words with a marked space, other characters as bytes."""
    words = ["\u2581hello", "\u2581world", "!", "\u2581", "a", "b"]
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)}
    vocab |= {word: 256 + index for index, word in enumerate(words)}
    tokenizer = HFTokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1, right=0),
        ]
    )
    return Tokenizer(tokenizer)


def test_no_piece_holds_half_a_character(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(MULTILINGUAL * 20, add_special_tokens=False)
    pieces = _pieces(tokenizer, ids)
    assert "".join(pieces) == MULTILINGUAL * 20
    assert all(REPLACEMENT not in piece for piece in pieces)


def test_byte_fallback_runs_of_emoji_come_whole(byte_fallback_tokenizer: Tokenizer) -> None:
    text = "\U0001f600\U0001f601\u4f60" * 20
    ids = list(text.encode())
    pieces = _pieces(byte_fallback_tokenizer, ids)
    assert "".join(pieces) == text
    assert max(map(len, pieces)) == 1


def test_space_before_the_first_output_word_is_kept(byte_fallback_tokenizer: Tokenizer) -> None:
    assert "".join(_pieces(byte_fallback_tokenizer, [257, 258], (256,))) == " world!"
    assert "".join(_pieces(byte_fallback_tokenizer, [257, 258])) == "world!"


def test_token_bytes_of_every_kind(
    tokenizer: Tokenizer, byte_fallback_tokenizer: Tokenizer
) -> None:
    ids = tokenizer.encode(MULTILINGUAL, add_special_tokens=False)
    assert b"".join(map(tokenizer.token_bytes, ids)) == MULTILINGUAL.encode()
    assert tokenizer.token_bytes(2) == b"<|im_end|>"
    assert tokenizer.token_bytes(10**6) == b""
    assert byte_fallback_tokenizer.token_bytes(0xE2) == b"\xe2"
    assert byte_fallback_tokenizer.token_bytes(256) == b" hello"


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(ids=st.lists(st.integers(0, 310), max_size=200))
def test_any_tokens_give_what_decoding_at_once_gives(tokenizer: Tokenizer, ids: list[int]) -> None:
    assert "".join(_pieces(tokenizer, ids)) == tokenizer.decode(ids)


def test_real_tokenizer_streams_what_it_decodes() -> None:
    cache = Path(os.environ.get("SLUICE_CACHE", Path.home() / ".cache" / "sluice"))
    path = cache / "models" / "SmolLM2-135M-Instruct"
    if not (path / "tokenizer.json").is_file():
        pytest.skip(f"the default model is not in {path}")
    tokenizer = Tokenizer.load(path)
    ids = tokenizer.encode(MULTILINGUAL * 10, add_special_tokens=False)
    assert "".join(_pieces(tokenizer, ids)) == MULTILINGUAL * 10
