"""Requests of OpenAI's API, and the sampling extensions that the field's servers share.

Types are strict: a string is never read as a number. ``null`` means absent. Unknown fields are
ignored, as OpenAI does; known ones that are not supported are refused (``router.unsupported``).

Source: https://platform.openai.com/docs/api-reference, completions and chat.
"""

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

MAX_CHOICES = 128
MAX_STOPS = 16
MAX_STOP_CHARS = 512
MAX_TOP_LOGPROBS = 20

StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]


class _Part(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False, frozen=True)


class StreamOptions(_Part):
    """Of a streamed response."""

    include_usage: bool = False


class GenerationRequest(_Part):
    """What completions and chat completions share."""

    model: Annotated[str, Field(min_length=1)]
    max_tokens: Annotated[int | None, Field(ge=1)] = None
    min_tokens: Annotated[int, Field(ge=0)] = 0
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] = 1
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] = 0
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] = 1.0
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    seed: Annotated[int | None, Field(ge=-(2**63), lt=2**63)] = None
    stop: Annotated[tuple[StopString, ...], Field(max_length=MAX_STOPS)] = ()
    stop_token_ids: Annotated[list[Annotated[int, Field(ge=0)]], Field(max_length=64)] = []
    ignore_eos: bool = False
    return_token_ids: bool = False
    """Adds ``token_ids`` to each choice."""
    stream: bool = False
    stream_options: StreamOptions | None = None
    cache_salt: Annotated[str, Field(max_length=256)] = ""
    user: str = ""

    @field_validator("stop", mode="before")
    @classmethod
    def _one_or_many_stops(cls, value: object) -> object:
        if isinstance(value, str):
            return (value,)
        return tuple(value) if isinstance(value, list) else value  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]

    @model_validator(mode="after")
    def _options_need_a_stream(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is allowed only with stream=true")
        return self

    @property
    def include_usage(self) -> bool:
        """Whether the stream ends with a chunk that holds the token counts."""
        return self.stream_options is not None and self.stream_options.include_usage


class CompletionRequest(GenerationRequest):
    """``POST /v1/completions``."""

    prompt: Any
    """Text, token ids, or a list of either; ``router.prompts`` checks and names what is wrong."""
    echo: bool = False
    logprobs: Annotated[int | None, Field(ge=0, le=MAX_TOP_LOGPROBS)] = None
    best_of: Annotated[int | None, Field(ge=1)] = None

    @model_validator(mode="after")
    def _no_search(self) -> Self:
        if self.best_of is not None and self.best_of != self.n:
            raise ValueError(
                f"best_of={self.best_of} is not supported; leave it out or set it to n"
            )
        if self.echo and self.logprobs is not None:
            raise ValueError("echo together with logprobs is not supported; leave one out")
        return self


class TextPart(_Part):
    """One part of a message's content."""

    type: Literal["text"]
    text: str


class ChatMessage(_Part):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart]
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: Annotated[list[object], Field(max_length=0)] = []

    def for_template(self) -> dict[str, str]:
        """Return what a chat template sees; text parts are joined by line breaks."""
        content = self.content
        if not isinstance(content, str):
            content = "\n".join(part.text for part in content)
        message = {"role": self.role, "content": content}
        return message if self.name is None else message | {"name": self.name}


class ChatRequest(GenerationRequest):
    """``POST /v1/chat/completions``."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: Annotated[int | None, Field(ge=1)] = None
    """The newer name of ``max_tokens``."""
    logprobs: bool = False
    top_logprobs: Annotated[int | None, Field(ge=0, le=MAX_TOP_LOGPROBS)] = None

    @model_validator(mode="after")
    def _names_agree(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs is allowed only with logprobs=true")
        both = (self.max_tokens, self.max_completion_tokens)
        if None not in both and both[0] != both[1]:
            raise ValueError("max_tokens and max_completion_tokens differ; send one of them")
        return self
