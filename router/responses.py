"""Bodies of OpenAI's responses, as structs: encoding one takes microseconds, so each token can.

Source: https://platform.openai.com/docs/api-reference, completions, chat and streaming.
"""

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from core.messages import FinishReason, RequestStats


class PromptTokensDetails(msgspec.Struct, frozen=True):
    """Of ``Usage``."""

    cached_tokens: int


class Usage(msgspec.Struct, frozen=True):
    """Token counts of one request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class TopLogprob(msgspec.Struct, frozen=True):
    """One candidate at one position."""

    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(msgspec.Struct, frozen=True):
    """The chosen token at one position and its rivals."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True):
    """Of one choice."""

    content: list[ChatTokenLogprob]


class CompletionLogprobs(msgspec.Struct, frozen=True):
    """Of one choice of a completion, four lists of equal length."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]] | None
    text_offset: list[int]


class ChatDelta(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a chunk adds to one message."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, frozen=True):
    """One choice's part of a chunk."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    token_ids: tuple[int, ...] | UnsetType = UNSET


class ChatMessage(msgspec.Struct, frozen=True):
    """A whole answer."""

    content: str
    role: Literal["assistant"] = "assistant"
    refusal: None = None


class ChatChoice(msgspec.Struct, frozen=True):
    """One choice of a whole response."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    token_ids: tuple[int, ...] | UnsetType = UNSET


class CompletionChoice(msgspec.Struct, frozen=True):
    """One choice of a completion, or its part of a chunk."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    token_ids: tuple[int, ...] | UnsetType = UNSET


Choice = ChatChunkChoice | ChatChoice | CompletionChoice


class Body(msgspec.Struct, frozen=True):
    """A whole response, or one chunk of a stream."""

    id: str
    object: Literal["chat.completion", "chat.completion.chunk", "text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[Choice]
    usage: Usage | UnsetType | None = UNSET
    sluice: RequestStats | UnsetType | None = UNSET
    """How the request was served; only where the client asked for it."""


class Problem(msgspec.Struct, frozen=True):
    """What went wrong, in OpenAI's form."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct, frozen=True):
    """Body of every 4xx and 5xx, and the last event of a stream that failed."""

    error: Problem


_encoder = msgspec.json.Encoder()


def to_json(body: Body | ErrorBody) -> bytes:
    """Return ``body`` as JSON."""
    return _encoder.encode(body)


def to_event(body: Body | ErrorBody) -> bytes:
    """Return ``body`` as one server-sent event."""
    return b"data: %b\n\n" % _encoder.encode(body)


DONE_EVENT = b"data: [DONE]\n\n"
"""Ends a stream that succeeded, and no other."""
