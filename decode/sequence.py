"""One sequence on a decode worker: what is known, what is computed, what is in flight."""

from dataclasses import dataclass, field

from blockmgr.token_run import TokenRun
from core.ids import OperationId, Owner, Slot
from core.messages import FinishReason
from core.sampling import SamplingParams, TokenLogprobs
from decode.state import State


@dataclass(slots=True, eq=False)
class Sequence:
    """Changed by ``DecodeScheduler`` alone.

    tokens    │ prompt │ outputs ...............│ sampled, not read yet │
    KV        │ settled ...............│ in flight │
              0              num_settled      num_computed
    """

    owner: Owner
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    cache_salt: str = ""
    output_token_ids: list[int] = field(default_factory=list[int])
    """Read from completed steps, prefill or an earlier attempt; sampled tokens in flight are not
    here."""
    state: State = State.WAITING
    slot: Slot | None = None
    num_known: int = 0
    """Tokens that the current admission feeds by value; later ones come from the slot."""
    num_computed: int = 0
    """Positions whose KV exists once every dispatched step has completed."""
    num_settled: int = 0
    """Positions whose KV exists now."""
    num_covered: int = 0
    """Positions that have room, as far as the block manager was asked since admission."""
    num_sampling: int = 0
    """Tokens that dispatched steps will sample."""
    num_steps_in_flight: int = 0
    arrival: int = 0
    """Order of arrival at this worker."""
    promised_blocks: int | None = None
    """Reserved for KV that is still to be received; None: nothing was promised yet."""
    run: TokenRun | None = None
    """Its tokens as the block manager sees them; made at the first look into the prefix tree."""
    num_cached_tokens: int = 0
    """Prompt tokens found in this worker's prefix cache at the first admission."""
    num_preemptions: int = 0
    load: OperationId | None = None
    """The copy that fills its blocks while it is LOADING."""
    may_load: bool = True
    """False after a load from a tier failed: then it is computed."""

    @property
    def num_tokens(self) -> int:
        """Tokens whose ids are known here."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def token_ids(self) -> list[int]:
        """All tokens whose ids are known here."""
        return [*self.prompt_token_ids, *self.output_token_ids]

    def token_slice(self, position: int, num_tokens: int) -> tuple[int, ...]:
        """Return the known tokens at ``[position, position + num_tokens)``."""
        num_prompt = len(self.prompt_token_ids)
        end = position + num_tokens
        if end <= num_prompt:
            return self.prompt_token_ids[position:end]
        return (
            *self.prompt_token_ids[position:num_prompt],
            *self.output_token_ids[max(0, position - num_prompt) : end - num_prompt],
        )

    @property
    def wants_token(self) -> bool:
        """Whether one more token may be sampled, counting those in flight (never beyond)."""
        return len(self.output_token_ids) + self.num_sampling < self.sampling.max_tokens


@dataclass(frozen=True, slots=True)
class Progress:
    """What one completed step means for one sequence."""

    sequence: Sequence
    token_id: int
    logprobs: TokenLogprobs | None
    finish_reason: FinishReason | None
