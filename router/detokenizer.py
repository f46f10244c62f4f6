"""Token ids to text, as they come, never half a character.

A token may be a part of a character, and what it decodes to may depend on its neighbours. So a
short window of tokens is decoded anew for each, and text that later tokens may still change is
held back: the replacement characters at its end. Cost per token does not grow with the text.
"""

from collections.abc import Sequence

from router.tokenizer import Tokenizer

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_WINDOW_TOKENS = 12
_MAX_WINDOW_TOKENS = 64
_CONTEXT_TOKENS = 5
"""Of the prompt: enough to tell whether the first token follows a space."""


class IncrementalDetokenizer:
    """Text of one sequence.

    The pieces that ``feed`` and ``flush`` return, joined, equal the decoding of all tokens at once
    wherever that decoding does not change what it said before (byte-fallback tokenizers do so for
    invalid UTF-8 only).
    """

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []
        self._emitted = 0  # characters of the decoded window
        self._boundary = 0  # tokens of the window before its last whole piece
        if not tokenizer.is_byte_level:
            self._see_context(list(prompt_token_ids[-_CONTEXT_TOKENS:]))

    def feed(self, token_id: int) -> str:
        """Return the text that became certain with ``token_id``: perhaps none."""
        self._window.append(token_id)
        text = self._tokenizer.decode(self._window)
        held = len(text) - len(text.rstrip(_REPLACEMENT))
        if len(self._window) > _MAX_WINDOW_TOKENS:
            held = 0  # a long run of invalid bytes: no character is under way in it
        if self._tokenizer.is_byte_level:
            held = min(held, 1)  # of invalid bytes only the last can be a character under way
        piece = self._emit(text, len(text) - held)
        if not held:
            self._close_piece()
        return piece

    def flush(self) -> str:
        """Return the text still held back, at the end of the sequence."""
        text = self._tokenizer.decode(self._window)
        return self._emit(text, len(text))

    def _emit(self, text: str, end: int) -> str:
        piece = text[self._emitted : end]
        self._emitted = max(self._emitted, end)
        return piece

    def _close_piece(self) -> None:
        """Shorten a long window to its last whole piece, which is context enough."""
        if len(self._window) >= _WINDOW_TOKENS and self._boundary:
            del self._window[: self._boundary]
            self._emitted = len(self._tokenizer.decode(self._window))
        self._boundary = len(self._window)

    def _see_context(self, token_ids: list[int]) -> None:
        text = self._tokenizer.decode(token_ids)
        if text and not text.endswith(_REPLACEMENT):
            self._window = token_ids
            self._emitted = len(text)
            self._boundary = len(token_ids)
