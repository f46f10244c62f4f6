"""Prompts of a request: text, messages or token ids to token ids that fit in the context."""

from collections.abc import Sequence
from typing import Any

from core.errors import RequestError
from router.failures import ContextLengthError
from router.model_card import ModelCard
from router.protocol import ChatRequest

MAX_PROMPTS = 256
_SHRINK = 4
"""No normalizer makes text shorter than this part of itself."""


def chat_prompt(request: ChatRequest, card: ModelCard, *, max_model_len: int) -> tuple[int, ...]:
    """Return the token ids of the conversation, an open assistant turn at its end.

    Raises:
        RequestError: the model has no chat template, the template refuses, or it is too long.
    """
    if card.chat_template is None:
        raise RequestError(
            f"model {card.name!r} has no chat template; use /v1/completions instead",
            field="messages",
        )
    text = card.chat_template.render([message.for_template() for message in request.messages])
    # The template writes the special tokens itself.
    return _encode(text, card, max_model_len, field="messages", add_special_tokens=False)


def completion_prompts(
    prompt: object, card: ModelCard, *, max_model_len: int
) -> tuple[tuple[int, ...], ...]:
    """Return the token ids of each prompt in ``prompt``: a text, ids, or a list of either.

    Raises:
        RequestError: of another type, empty, an id that the model does not have, or too long.
    """
    prompts = _as_list(prompt)
    if not 0 < len(prompts) <= MAX_PROMPTS:
        raise RequestError(
            f"prompt: {len(prompts)} prompts; send 1 to {MAX_PROMPTS}", field="prompt"
        )
    several = len(prompts) > 1
    return tuple(
        _prompt_ids(one, card, max_model_len, field=f"prompt[{index}]" if several else "prompt")
        for index, one in enumerate(prompts)
    )


def _as_list(prompt: object) -> Sequence[Any]:
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, list):
        raise RequestError(
            f"prompt: must be a string, token ids, or a list of either "
            f"(got {type(prompt).__name__})",
            field="prompt",
        )
    is_ids = bool(prompt) and not isinstance(prompt[0], (str, list))  # pyright: ignore[reportUnknownArgumentType]
    return [prompt] if is_ids else prompt  # pyright: ignore[reportUnknownVariableType]


def _prompt_ids(
    prompt: object, card: ModelCard, max_model_len: int, *, field: str
) -> tuple[int, ...]:
    if isinstance(prompt, str):
        if not prompt:
            raise RequestError(f"{field}: is empty; send at least one token", field="prompt")
        return _encode(prompt, card, max_model_len, field=field, add_special_tokens=True)
    if not isinstance(prompt, list):
        raise RequestError(
            f"{field}: must be a string or token ids (got {type(prompt).__name__}); "
            "all prompts of a list must be of one kind",
            field="prompt",
        )
    token_ids: list[Any] = prompt  # pyright: ignore[reportUnknownVariableType]
    _check_length(len(token_ids), max_model_len, field=field)
    for index, token_id in enumerate(token_ids):
        if type(token_id) is not int or not 0 <= token_id < card.vocab_size:
            raise RequestError(
                f"{field}[{index}]: token ids are integers from 0 to {card.vocab_size - 1} "
                f"(got {token_id!r:.40})",
                field="prompt",
            )
    return tuple(token_ids)


def _encode(
    text: str, card: ModelCard, max_model_len: int, *, field: str, add_special_tokens: bool
) -> tuple[int, ...]:
    # So long a text cannot fit: it is refused without the work of tokenizing it.
    if len(text) > max_model_len * card.tokenizer.longest_token_chars * _SHRINK:
        raise ContextLengthError(
            f"{field}: {len(text)} characters do not fit in the model's context of "
            f"{max_model_len} tokens; shorten it",
            field=field.partition("[")[0],
        )
    token_ids = card.tokenizer.encode(text, add_special_tokens=add_special_tokens)
    _check_length(len(token_ids), max_model_len, field=field)
    return tuple(token_ids)


def _check_length(num_tokens: int, max_model_len: int, *, field: str) -> None:
    name = field.partition("[")[0]
    if num_tokens == 0:
        raise RequestError(f"{field}: is empty; send at least one token", field=name)
    if num_tokens >= max_model_len:
        raise ContextLengthError(
            f"{field}: {num_tokens} tokens leave no room for output in the model's context of "
            f"{max_model_len} tokens; shorten it",
            field=name,
        )
