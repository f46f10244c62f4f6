"""What a decode worker records of each request's way."""

from core.ids import OperationId, Owner
from core.messages import FinishReason, Prefill, Renewed, Ticket
from core.trace import Recorder
from decode.sequence import Sequence
from decode.step_part import StepPart
from transfer.actions import Deliver, PostRead
from transfer.reads import ReadEnd

MAX_REASON = 200
"""Characters of a reason that are kept."""


class DecodeTrace:
    """Entries of one worker. See ``core.trace.DecodeEvent`` for what each one tells."""

    def __init__(self, recorder: Recorder) -> None:
        self._record = recorder.record
        self._owner_of_operation: dict[OperationId, Owner] = {}
        """Of reads that are not over."""

    def received(self, sequence: Sequence) -> None:
        """A request came, and its prefix has been looked for."""
        self._record(sequence.owner, "received", tokens=sequence.num_tokens)
        if sequence.num_computed:
            self._record(sequence.owner, "prefix_hit", tokens=sequence.num_computed)

    def asked(self, message: Prefill, peer: str) -> None:
        """Prefill is asked for what is missing."""
        owner = (message.request_id, message.attempt)
        self._record(owner, "prefill_asked", peer=peer, first_token=message.first_token)

    def ticket(self, ticket: Ticket) -> None:
        """Prefill offers a piece."""
        self._record(
            (ticket.request_id, ticket.attempt),
            "ticket",
            chunk=ticket.piece.chunk,
            first_layer=ticket.piece.first_layer,
            last_layer=ticket.piece.last_layer,
            blocks=sum(len(named.block_ids) for named in ticket.blocks),
            tokens=ticket.num_tokens,
            last=int(ticket.last),
        )

    def renewed(self, message: Renewed) -> None:
        """Prefill holds what it has offered for longer."""
        for owner in message.requests:
            self._record(owner, "lease_renewed")

    def allocated(self, owner: Owner, ticket: Ticket, operation: OperationId) -> None:
        """There is memory for a piece."""
        num_blocks = sum(len(named.block_ids) for named in ticket.blocks)
        chunk = ticket.piece.chunk
        self._record(owner, "allocated", operation=operation, chunk=chunk, blocks=num_blocks)

    def posting(self, read: PostRead) -> None:
        """A read is about to be posted."""
        self._owner_of_operation[read.operation] = read.owner
        self._record(
            read.owner,
            "read_posted",
            operation=read.operation,
            chunk=read.piece.chunk,
            first_layer=read.piece.first_layer,
            last_layer=read.piece.last_layer,
        )

    def read_ended(self, end: ReadEnd) -> None:
        """A read is over, whatever has become of its request meanwhile."""
        owner = self._owner_of_operation.pop(end.operation)
        failure = "cancelled" if end.is_cancelled else end.failure
        if failure is not None:
            reason = f"{failure:.{MAX_REASON}}"
            self._record(owner, "read_failed", operation=end.operation, reason=reason)
            return
        self._record(
            owner,
            "read_landed",
            operation=end.operation,
            nbytes=end.nbytes,
            descriptors=end.num_descriptors,
            seconds=end.duration_s,
            path=end.path,
        )

    def delivered(self, delivery: Deliver) -> None:
        """All KV is here and may be trusted."""
        stats = delivery.stats
        self._record(delivery.owner, "delivered", nbytes=stats.kv_nbytes, tickets=stats.num_tickets)

    def recomputing(self, owner: Owner, reason: str) -> None:
        """The KV does not come; it is computed here."""
        self._record(owner, "recomputing", reason=f"{reason:.{MAX_REASON}}")

    def step(self, parts: list[StepPart], duration_s: float) -> None:
        """A step has computed ``parts`` of prompts. Steps of single tokens are not recorded."""
        for part in parts:
            self._record(part.sequence.owner, "step", seconds=duration_s, tokens=part.num_tokens)

    def first_token(self, owner: Owner) -> None:
        """The first token is on its way to the router."""
        self._record(owner, "first_token")

    def finished(self, sequence: Sequence, reason: FinishReason) -> None:
        """The last token is on its way to the router."""
        self._record(
            sequence.owner,
            "finished",
            tokens=len(sequence.output_token_ids),
            reason=reason,
            preemptions=sequence.num_preemptions,
        )

    def aborted(self, owner: Owner) -> None:
        """Nobody wants the rest."""
        self._record(owner, "aborted")

    def failed(self, owner: Owner, kind: str, reason: str) -> None:
        """It ended without a result."""
        self._record(owner, "failed", kind=kind, reason=f"{reason:.{MAX_REASON}}")
