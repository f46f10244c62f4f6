"""How one request's tokens are chosen and when it ends. Shared by router and engine."""

from typing import Annotated

import msgspec
from msgspec import Meta

from core.bounds import MAX_COUNT, Count, Positive, TokenId


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True):
    """Sampling of one sequence, already validated by the router.

    The random number of the token at position ``p`` depends on ``seed`` and ``p`` alone, so a
    request that moves to another worker, or meets other requests in its batch, goes on with the
    same text.
    """

    seed: int
    """64 bits. The router draws one when the client sends none."""
    max_tokens: Positive
    """Output tokens, at least 1."""
    min_tokens: Count = 0
    """While fewer output tokens exist, ``stop_token_ids`` cannot be sampled."""
    temperature: Annotated[float, Meta(ge=0, le=100)] = 1.0
    """0 is greedy."""
    top_k: Annotated[int, Meta(ge=-1, le=MAX_COUNT)] = 0
    """0 keeps all tokens."""
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[float, Meta(gt=0, le=100)] = 1.0
    """Over prompt and output, as in ``transformers``."""
    presence_penalty: Annotated[float, Meta(ge=-100, le=100)] = 0.0
    """Over the output only, as in OpenAI's API."""
    frequency_penalty: Annotated[float, Meta(ge=-100, le=100)] = 0.0
    logprobs: Annotated[int, Meta(ge=0, le=1000)] | None = None
    """None: none; 0: of the chosen token; n: also of the n likeliest (of the raw distribution)."""
    stop_token_ids: Annotated[tuple[TokenId, ...], Meta(max_length=1024)] = ()
    """Sampling one of these ends the sequence. Holds the model's eos ids unless ``ignore_eos``."""

    @property
    def has_penalties(self) -> bool:
        """Whether the sampler needs the sequence's token counts."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )


class TokenLogprobs(msgspec.Struct, frozen=True):
    """Log-probabilities at one output position, natural logarithm."""

    chosen: float
    top: tuple[tuple[int, float], ...] = ()
    """(token id, logprob), likeliest first."""
