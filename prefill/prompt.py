"""One request's tokens on their way through prefill."""

from dataclasses import dataclass

from blockmgr.token_run import TokenRun
from core.ids import Owner, Slot
from core.messages import GroupBlocks, Prefill


@dataclass(slots=True, eq=False)
class Prompt:
    """Changed by the scheduler and its queue alone."""

    owner: Owner
    request: Prefill
    token_ids: tuple[int, ...]
    """Prompt, and what an earlier attempt has generated."""
    run: TokenRun
    may_load: bool = True
    """False after a load from a tier failed: then it is computed."""
    num_cached_tokens: int = 0
    num_computed: int = 0
    num_settled: int = 0
    num_offered: int = 0
    """Tokens whose KV tickets cover."""
    num_chunks_offered: int = 0
    last_blocks: tuple[GroupBlocks, ...] | None = None
    """Of the last chunk, once some of its layers are offered."""
    num_cuts_offered: int = 0
    """Of the last chunk."""
    slot: Slot | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens to compute."""
        return len(self.token_ids)

    @property
    def is_pinned_at_reader(self) -> bool:
        """The reader holds the KV of the first tokens, and keeps memory for the rest."""
        return self.request.first_token > 0

    def start_at(self, num_tokens: int) -> None:
        """The KV of the first ``num_tokens`` is here."""
        self.num_cached_tokens = self.num_computed = self.num_settled = num_tokens
