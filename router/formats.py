"""What turns a generation into the bodies of one of OpenAI's two APIs."""

import time
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import Protocol

from msgspec import UNSET, UnsetType

from core.messages import RequestStats
from router.logprobs import chat_logprobs, completion_logprobs
from router.model_card import ModelCard
from router.responses import (
    Body,
    ChatChoice,
    ChatChunkChoice,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    Choice,
    CompletionChoice,
    CompletionLogprobs,
    PromptTokensDetails,
    Usage,
)
from router.sequence import Delta, Sequence


@dataclass(frozen=True, slots=True)
class ResponseOptions:
    """What the client asked for, beside the text."""

    response_id: str
    num_prompt_tokens: int
    include_usage: bool = False
    logprobs: int | None = None
    echoes: tuple[str, ...] = ()
    """Of each choice: the prompt's text, shown before the output."""
    with_stats: bool = False
    with_token_ids: bool = False

    def token_ids(self, delta: Delta) -> tuple[int, ...] | UnsetType:
        """Return the ids of the delta's tokens where the client asked for them."""
        return delta.token_ids if self.with_token_ids else UNSET

    created: int = field(default_factory=lambda: int(time.time()))


class ResponseFormat(Protocol):
    """One of the two APIs."""

    @property
    def options(self) -> ResponseOptions:
        """As given."""
        ...

    def opening(self, index: int) -> Choice | None:
        """Return what a choice's stream begins with, if that is not its first text."""
        ...

    def chunk_choice(self, index: int, delta: Delta) -> Choice:
        """Return a choice's next part of a stream."""
        ...

    def whole_choice(self, index: int, delta: Delta) -> Choice:
        """Return a whole choice, from all its deltas joined."""
        ...

    def body(
        self,
        choices: list[Choice],
        *,
        is_chunk: bool,
        usage: Usage | UnsetType | None = UNSET,
        stats: RequestStats | UnsetType | None = UNSET,
    ) -> Body:
        """Return a response or one chunk of it."""
        ...


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """``/v1/chat/completions``."""

    card: ModelCard
    options: ResponseOptions

    def opening(self, index: int) -> Choice | None:
        """See ``ResponseFormat``: the role."""
        return ChatChunkChoice(index, ChatDelta(role="assistant", content=""), None, None)

    def chunk_choice(self, index: int, delta: Delta) -> Choice:
        """See ``ResponseFormat``."""
        content = delta.text if delta.text or delta.finish_reason is None else UNSET
        return ChatChunkChoice(
            index,
            ChatDelta(content=content),
            self._logprobs(delta),
            delta.finish_reason,
            self.options.token_ids(delta),
        )

    def whole_choice(self, index: int, delta: Delta) -> Choice:
        """See ``ResponseFormat``."""
        message = ChatMessage(content=delta.text)
        return ChatChoice(
            index,
            message,
            self._logprobs(delta),
            delta.finish_reason,
            self.options.token_ids(delta),
        )

    def body(
        self,
        choices: list[Choice],
        *,
        is_chunk: bool,
        usage: Usage | UnsetType | None = UNSET,
        stats: RequestStats | UnsetType | None = UNSET,
    ) -> Body:
        """See ``ResponseFormat``."""
        return Body(
            id=self.options.response_id,
            object="chat.completion.chunk" if is_chunk else "chat.completion",
            created=self.options.created,
            model=self.card.name,
            system_fingerprint=self.card.fingerprint,
            choices=choices,
            usage=usage,
            sluice=stats,
        )

    def _logprobs(self, delta: Delta) -> ChatLogprobs | None:
        if self.options.logprobs is None:
            return None
        return chat_logprobs(delta.entries, self.card.tokenizer)


@dataclass(frozen=True, slots=True)
class CompletionFormat:
    """``/v1/completions``."""

    card: ModelCard
    options: ResponseOptions

    def opening(self, index: int) -> Choice | None:
        """See ``ResponseFormat``: the echoed prompt."""
        echo = self._echo(index)
        return CompletionChoice(index, echo, None, None) if echo else None

    def chunk_choice(self, index: int, delta: Delta) -> Choice:
        """See ``ResponseFormat``."""
        return self._choice(index, delta.text, delta)

    def whole_choice(self, index: int, delta: Delta) -> Choice:
        """See ``ResponseFormat``."""
        text = self._echo(index) + delta.text
        return self._choice(index, text, delta)

    def _choice(self, index: int, text: str, delta: Delta) -> CompletionChoice:
        return CompletionChoice(
            index,
            text,
            self._logprobs(delta),
            delta.finish_reason,
            self.options.token_ids(delta),
        )

    def body(
        self,
        choices: list[Choice],
        *,
        is_chunk: bool,  # noqa: ARG002 - both have one name here
        usage: Usage | UnsetType | None = UNSET,
        stats: RequestStats | UnsetType | None = UNSET,
    ) -> Body:
        """See ``ResponseFormat``."""
        return Body(
            id=self.options.response_id,
            object="text_completion",
            created=self.options.created,
            model=self.card.name,
            system_fingerprint=self.card.fingerprint,
            choices=choices,
            usage=usage,
            sluice=stats,
        )

    def _echo(self, index: int) -> str:
        return self.options.echoes[index] if self.options.echoes else ""

    def _logprobs(self, delta: Delta) -> CompletionLogprobs | None:
        num_top = self.options.logprobs
        if num_top is None:
            return None
        return completion_logprobs(delta.entries, self.card.tokenizer, with_top=num_top > 0)


def usage_of(sequences: Items[Sequence], *, num_prompt_tokens: int) -> Usage:
    """Return the token counts of a request; each prompt counts once, however many choices."""
    num_output_tokens = sum(len(sequence.token_ids) for sequence in sequences)
    cached_by_prompt: dict[tuple[int, ...], int] = {}
    for sequence in sequences:
        if sequence.stats is not None:
            prompt = sequence.spec.prompt_token_ids
            num_cached = max(cached_by_prompt.get(prompt, 0), sequence.stats.num_cached_tokens)
            cached_by_prompt[prompt] = min(num_cached, len(prompt))
    return Usage(
        prompt_tokens=num_prompt_tokens,
        completion_tokens=num_output_tokens,
        total_tokens=num_prompt_tokens + num_output_tokens,
        prompt_tokens_details=PromptTokensDetails(sum(cached_by_prompt.values())),
    )


def joined(deltas: Items[Delta]) -> Delta:
    """Return the deltas of one sequence as one."""
    return Delta(
        text="".join(delta.text for delta in deltas),
        token_ids=tuple(token_id for delta in deltas for token_id in delta.token_ids),
        entries=tuple(entry for delta in deltas for entry in delta.entries),
        finish_reason=deltas[-1].finish_reason if deltas else None,
    )
