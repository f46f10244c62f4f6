"""What a prefill worker records of each request's way."""

from typing import Literal

from core.ids import Owner
from core.messages import Ticket
from core.trace import Recorder
from prefill.prompt import Prompt

MAX_REASON = 200
"""Characters of a reason that are kept."""


class PrefillTrace:
    """Entries of one worker. See ``core.trace.PrefillEvent`` for what each one tells."""

    def __init__(self, recorder: Recorder) -> None:
        self._record = recorder.record

    def received(self, owner: Owner, *, num_tokens: int, first_token: int) -> None:
        """A decode worker asks for a prompt's KV from ``first_token`` on."""
        self._record(owner, "received", tokens=num_tokens, first_token=first_token)

    def admitted(self, parts: list[tuple[Prompt, range]]) -> None:
        """A step was dispatched; those whose first tokens are in it have their blocks now."""
        for prompt, tokens in parts:
            if tokens.start == prompt.num_cached_tokens:
                self._record(prompt.owner, "admitted", tokens=prompt.num_cached_tokens)

    def step(self, parts: list[tuple[Prompt, range]], duration_s: float) -> None:
        """A step has computed some tokens of each prompt in ``parts``."""
        for prompt, tokens in parts:
            self._record(
                prompt.owner, "step", seconds=duration_s, tokens=len(tokens), first=tokens.start
            )

    def offered(self, ticket: Ticket) -> None:
        """A piece is offered to the reader."""
        self._record(
            (ticket.request_id, ticket.attempt),
            "ticket_sent",
            chunk=ticket.piece.chunk,
            first_layer=ticket.piece.first_layer,
            last_layer=ticket.piece.last_layer,
            blocks=sum(len(named.block_ids) for named in ticket.blocks),
            last=int(ticket.last),
        )

    def ended(self, owner: Owner, how: Literal["released", "withdrawn", "expired"]) -> None:
        """Nothing is held for the reader any more."""
        self._record(owner, how)

    def failed(self, owner: Owner, reason: str) -> None:
        """The prompt was refused, or its reader is gone."""
        self._record(owner, "failed", reason=f"{reason:.{MAX_REASON}}")
