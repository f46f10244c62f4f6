"""A validated request to the sequences that it asks for; run in a thread where slow."""

import secrets
from dataclasses import dataclass

from core.errors import ModelNotFoundError, RequestError
from core.ids import Incarnation, RequestId
from core.sampling import SamplingParams
from router.failures import ContextLengthError
from router.model_card import ModelCard
from router.prompts import chat_prompt, completion_prompts
from router.protocol import ChatRequest, CompletionRequest, GenerationRequest
from router.sequence import SequenceSpec

DEFAULT_COMPLETION_TOKENS = 16
_SEED_MASK = 2**63 - 1


@dataclass(frozen=True, slots=True)
class Prepared:
    """What a request asks for, one spec for each choice of the response, in its order."""

    response_id: str
    specs: tuple[SequenceSpec, ...]
    num_prompt_tokens: int
    """Each prompt counted once, however many choices it has."""


def prepare_completion(
    request: CompletionRequest, card: ModelCard, *, router: Incarnation, max_model_len: int
) -> Prepared:
    """Return the sequences of a completion request: ``n`` for each prompt.

    Raises:
        RequestError: unknown model, bad prompt, or too long.
    """
    _check_model(request, card)
    prompts = completion_prompts(request.prompt, card, max_model_len=max_model_len)
    max_tokens = request.max_tokens or DEFAULT_COMPLETION_TOKENS
    if request.max_tokens is None:
        longest = max(map(len, prompts))
        max_tokens = min(max_tokens, max_model_len - longest)
    return _prepare(
        request,
        prompts,
        card,
        response_id=_response_id("cmpl", router),
        logprobs=request.logprobs,
        max_tokens=max_tokens,
        max_model_len=max_model_len,
    )


def prepare_chat(
    request: ChatRequest, card: ModelCard, *, router: Incarnation, max_model_len: int
) -> Prepared:
    """Return the sequences of a chat request: ``n`` answers.

    Raises:
        RequestError: unknown model, a conversation that the template refuses, or too long.
    """
    _check_model(request, card)
    prompt = chat_prompt(request, card, max_model_len=max_model_len)
    max_tokens = request.max_completion_tokens or request.max_tokens
    return _prepare(
        request,
        (prompt,),
        card,
        response_id=_response_id("chatcmpl", router),
        logprobs=(request.top_logprobs or 0) if request.logprobs else None,
        max_tokens=max_tokens or max_model_len - len(prompt),
        max_model_len=max_model_len,
    )


def _response_id(prefix: str, router: Incarnation) -> str:
    """Return an id that no other life of a router can give.

    Workers know a request by it, and take a newer attempt of one request for the end of the older:
    that must never meet a request of another router. What a client calls it is no part of it.
    """
    return f"{prefix}-{router}-{secrets.token_hex(8)}"


def _check_model(request: GenerationRequest, card: ModelCard) -> None:
    if request.model != card.name:
        raise ModelNotFoundError(
            f"model {request.model!r:.100} does not exist here; use {card.name!r}", field="model"
        )


def _prepare(
    request: GenerationRequest,
    prompts: tuple[tuple[int, ...], ...],
    card: ModelCard,
    *,
    response_id: str,
    logprobs: int | None,
    max_tokens: int,
    max_model_len: int,
) -> Prepared:
    _check_lengths(request, prompts, max_tokens, max_model_len)
    _check_stop_ids(request, card)
    first_seed = secrets.randbits(63) if request.seed is None else request.seed
    specs = tuple(
        SequenceSpec(
            request_id=RequestId(f"{response_id}-{prompt_index * request.n + choice}"),
            prompt_token_ids=prompt,
            sampling=_sampling(
                request,
                card,
                seed=(first_seed + choice) & _SEED_MASK,
                logprobs=logprobs,
                max_tokens=max_tokens,
            ),
            stop=request.stop,
            cache_salt=request.cache_salt,
        )
        for prompt_index, prompt in enumerate(prompts)
        for choice in range(request.n)
    )
    return Prepared(response_id, specs, sum(map(len, prompts)))


def _check_lengths(
    request: GenerationRequest,
    prompts: tuple[tuple[int, ...], ...],
    max_tokens: int,
    max_model_len: int,
) -> None:
    longest = max(map(len, prompts))
    if longest + max_tokens > max_model_len:
        raise ContextLengthError(
            f"max_tokens: {longest} prompt tokens and {max_tokens} output tokens exceed the "
            f"model's context of {max_model_len} tokens; ask for at most {max_model_len - longest}",
            field="max_tokens",
        )
    if request.min_tokens > max_tokens:
        raise RequestError(
            f"min_tokens: {request.min_tokens} is more than max_tokens={max_tokens}; lower it",
            field="min_tokens",
        )


def _check_stop_ids(request: GenerationRequest, card: ModelCard) -> None:
    for token_id in request.stop_token_ids:
        if token_id >= card.vocab_size:
            raise RequestError(
                f"stop_token_ids: {token_id} is not a token id; use 0 to {card.vocab_size - 1}",
                field="stop_token_ids",
            )


def _sampling(
    request: GenerationRequest,
    card: ModelCard,
    *,
    seed: int,
    logprobs: int | None,
    max_tokens: int,
) -> SamplingParams:
    eos = () if request.ignore_eos else card.eos_token_ids
    return SamplingParams(
        seed=seed,
        max_tokens=max_tokens,
        min_tokens=request.min_tokens,
        temperature=request.temperature,
        top_k=max(request.top_k, 0),
        top_p=request.top_p,
        min_p=request.min_p,
        repetition_penalty=request.repetition_penalty,
        presence_penalty=request.presence_penalty,
        frequency_penalty=request.frequency_penalty,
        logprobs=logprobs,
        stop_token_ids=tuple(dict.fromkeys((*eos, *request.stop_token_ids))),
    )
