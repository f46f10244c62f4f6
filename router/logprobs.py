"""Log-probabilities in the forms of OpenAI's two APIs."""

from collections.abc import Sequence

from router.responses import ChatLogprobs, ChatTokenLogprob, CompletionLogprobs, TopLogprob
from router.sequence import TokenEntry
from router.tokenizer import Tokenizer

_LOWEST = -9999.0
"""What OpenAI sends for a token of no probability; JSON has no infinity."""


def chat_logprobs(entries: Sequence[TokenEntry], tokenizer: Tokenizer) -> ChatLogprobs:
    """Return ``entries`` as chat completions show them: text and exact bytes of each token."""
    content: list[ChatTokenLogprob] = []
    for entry in entries:
        chosen = _top_logprob(entry.token_id, entry.logprobs.chosen, tokenizer)
        rivals = [_top_logprob(token, value, tokenizer) for token, value in entry.logprobs.top]
        content.append(ChatTokenLogprob(chosen.token, chosen.logprob, chosen.bytes, rivals))
    return ChatLogprobs(content)


def completion_logprobs(
    entries: Sequence[TokenEntry], tokenizer: Tokenizer, *, with_top: bool
) -> CompletionLogprobs:
    """Return ``entries`` as completions show them.

    Args:
        entries: shown tokens.
        tokenizer: names them.
        with_top: whether rivals were asked for.
    """
    tops: list[dict[str, float]] = []
    for entry in entries:
        top = {
            _token_text(token, tokenizer): _bounded(value) for token, value in entry.logprobs.top
        }
        top.setdefault(_token_text(entry.token_id, tokenizer), _bounded(entry.logprobs.chosen))
        tops.append(top)
    return CompletionLogprobs(
        tokens=[_token_text(entry.token_id, tokenizer) for entry in entries],
        token_logprobs=[_bounded(entry.logprobs.chosen) for entry in entries],
        top_logprobs=tops if with_top else None,
        text_offset=[entry.text_offset for entry in entries],
    )


def _top_logprob(token_id: int, logprob: float, tokenizer: Tokenizer) -> TopLogprob:
    token = tokenizer.token_bytes(token_id)
    return TopLogprob(token.decode(errors="replace"), _bounded(logprob), list(token))


def _token_text(token_id: int, tokenizer: Tokenizer) -> str:
    r"""Return the token's text; a part of a character as ``bytes:\\xe2\\x82``, as OpenAI does."""
    token = tokenizer.token_bytes(token_id)
    try:
        return token.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)


def _bounded(logprob: float) -> float:
    return max(_LOWEST, logprob)
