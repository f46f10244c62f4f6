"""Which sequences run in the next step: continuous batching with chunked prefill and preemption.

Pure: no clock, no I/O. Steps are scheduled before the output of earlier ones is read; positions
count as settled, and tokens as known, only when their step has completed.
"""

import itertools
from collections.abc import Iterable

from blockmgr.block_manager import BlockManager
from blockmgr.receive_target import ReceiveTarget
from blockmgr.tiers import Tiers
from core.config import SchedulerConfig
from core.errors import RequestError
from core.ids import BlockId, Generation, OperationId, Owner, StepSeq
from core.kv_layout import KVLayout
from core.messages import FinishReason
from decode.kv_budget import KVBudget
from decode.newcomers import Newcomers
from decode.remote_admission import RemoteAdmission
from decode.running import RunningChoice
from decode.sequence import Progress, Sequence
from decode.sequence_table import SequenceTable
from decode.state import Action, Event, State
from decode.step_part import StepPart, dispatch_part, finish_reason_of
from engine.batch import SlotOpening, StepBatch, StepOutput


class DecodeScheduler:
    """Owns the sequences and, through them, every block that is not cached.

    Invariants: those of ``SequenceTable`` and ``BlockManager``; ``check_invariants`` asserts both.
    """

    def __init__(
        self,
        blocks: BlockManager,
        layout: KVLayout,
        config: SchedulerConfig,
        *,
        fingerprint: str,
        tiers: Tiers | None = None,
    ) -> None:
        self._blocks = blocks
        self._budget = KVBudget(blocks, layout, config, fingerprint=fingerprint, tiers=tiers)
        self._table = SequenceTable(blocks, self._budget, max_num_seqs=config.max_num_seqs)
        self._remote = RemoteAdmission(blocks, self._budget, self._table)
        self._running = RunningChoice(blocks, self._budget, self._table, config)
        self._newcomers = Newcomers(blocks, self._budget, self._table, self._remote, config)
        self._steps: dict[StepSeq, list[StepPart]] = {}
        self._arrivals = itertools.count()

    # Sequences in and out

    def add(self, sequence: Sequence, *, remote: bool) -> None:
        """Take a new sequence: computed here, or (``remote``) received from a prefill worker.

        For a remote one the prefix found here is pinned, and ``num_computed`` tells how far the
        prefill worker's tickets need not reach.

        Raises:
            RequestError: it can never fit into the pool. Nothing was taken.
        """
        if not sequence.prompt_token_ids:
            raise RequestError("prompt is empty; send at least one token", field="prompt")
        if len(sequence.output_token_ids) >= sequence.sampling.max_tokens:
            raise RequestError(
                f"{len(sequence.output_token_ids)} tokens of max_tokens="
                f"{sequence.sampling.max_tokens} are there already",
                field="max_tokens",
            )
        need = self._budget.blocks_for(
            len(sequence.prompt_token_ids) + sequence.sampling.max_tokens
        )
        if need > self._budget.num_blocks:
            raise RequestError(
                f"prompt and max_tokens need {need} KV blocks, the pool has "
                f"{self._budget.num_blocks}; shorten the prompt or lower max_tokens",
                field="max_tokens",
            )
        sequence.arrival = next(self._arrivals)
        if remote:
            sequence.state = State.REMOTE
            self._remote.pin_prefix(sequence)
        else:
            self._budget.fetch(sequence)
        self._table.add(sequence)

    def num_uncached_tokens(self, sequence: Sequence) -> int:
        """Tokens of ``sequence`` that neither the pool nor host memory has. Changes nothing."""
        hit = self._budget.loadable_hit(sequence, self._budget.usable_hit(sequence))
        return sequence.num_tokens - hit

    def receive(
        self, owner: Owner, targets: Iterable[ReceiveTarget], operation: OperationId
    ) -> list[list[tuple[BlockId, Generation]]] | None:
        """Find the blocks that a ticket's read will fill; None: no memory yet, try again.

        The first ticket is promised the whole prompt. Tickets for other layers of the same
        positions get the same blocks.
        """
        return self._remote.receive(self._table[owner], list(targets), operation)

    def deliver(self, owner: Owner, first_token: int) -> None:
        """All KV of a remote sequence is here; ``first_token`` is its next output."""
        sequence = self._table[owner]
        sequence.num_computed = sequence.num_settled = sequence.num_tokens
        self._budget.settle(sequence, sequence.num_tokens)
        sequence.output_token_ids.append(first_token)
        sequence.num_known = sequence.num_tokens
        self._table.make_ready(sequence)

    def finish_delivered(self, owner: Owner) -> FinishReason | None:
        """End a READY sequence whose first token was its last; None: it goes on."""
        sequence = self._table[owner]
        reason = finish_reason_of(sequence)
        if reason is not None:
            self._table.end(sequence, Event.FINISHED)
        return reason

    def abort(self, owner: Owner) -> bool:
        """End a sequence; its blocks are released now, and free once nothing touches them.

        Returns whether reads of it must be cancelled. Unknown owners are ignored.
        """
        sequence = self._table.get(owner)
        if sequence is None:
            return False
        return Action.CANCEL_READS in self._end(sequence, Event.ABORTED)

    def recompute(self, owner: Owner) -> None:
        """Compute a remote sequence here, whose KV will not come.

        The prefix that it had found here goes back to the cache, and is found again.
        """
        self._remote.forget(owner)
        self._table.recompute(self._table[owner])

    def lose_prefill(self, owner: Owner) -> None:
        """End a remote sequence whose KV will not come."""
        self._end(self._table[owner], Event.PREFILL_LOST)

    def _end(self, sequence: Sequence, event: Event) -> tuple[Action, ...]:
        self._remote.forget(sequence.owner)
        self._budget.forget(sequence)
        return self._table.end(sequence, event)

    def get(self, owner: Owner) -> Sequence | None:
        """Return the live sequence of ``owner``."""
        return self._table.get(owner)

    # Steps

    def schedule(self) -> StepBatch | None:
        """Return the next step's batch, already dispatched in the block manager; None: no work."""
        self._newcomers.take_loads()
        chosen, is_starved = self._running.choose()
        is_step_in_flight = bool(self._steps)
        openings: list[SlotOpening] = []
        # Where blocks are short nobody new comes in, unless nothing else would ever run.
        if not is_starved or not (chosen or is_step_in_flight):
            openings = self._newcomers.admit(chosen, is_step_in_flight=is_step_in_flight)
        if not chosen:
            return None
        parts = [dispatch_part(each) for each in chosen]
        step = self._blocks.dispatch_step(part.sequence.owner for part in parts)
        self._budget.count_step()
        self._steps[step] = parts
        return StepBatch(
            step=step,
            openings=tuple(openings),
            sequences=tuple(
                part.as_input(self._blocks.block_tables(part.sequence.owner)) for part in parts
            ),
            zero_blocks=self._blocks.take_zero_list(),
        )

    def prompt_parts(self, step: StepSeq) -> list[StepPart]:
        """Return what a step in flight computes beside the next tokens of sequences."""
        return [part for part in self._steps[step] if part.num_tokens > 1]

    def complete(self, output: StepOutput) -> list[Progress]:
        """Take a completed step's output; sequences that ended have released their blocks."""
        parts = self._steps.pop(output.step)
        self._blocks.complete_step(output.step)
        token_of_slot = {token.slot: token for token in output.tokens}
        progress: list[Progress] = []
        for part in parts:
            sequence = part.sequence
            if sequence.state is not State.RUNNING:
                continue  # ended meanwhile; who has a step in flight is never preempted
            sequence.num_steps_in_flight -= 1
            sequence.num_settled += part.num_tokens
            if part.samples:
                token = token_of_slot[part.slot]
                sequence.num_sampling -= 1
                sequence.output_token_ids.append(token.token_id)
                reason = finish_reason_of(sequence)
                progress.append(Progress(sequence, token.token_id, token.logprobs, reason))
            self._budget.settle(sequence, part.num_tokens)
            if part.samples and progress[-1].finish_reason is not None:
                self._table.end(sequence, Event.FINISHED)
        return progress

    def fail_step(self, step: StepSeq) -> None:
        """Retire a step that died, after the device was drained. Its sequences get no output."""
        self._steps.pop(step)
        self._blocks.fail_step(step)

    @property
    def num_running(self) -> int:
        """Sequences in the batch, ready for it, or being loaded."""
        return self._table.num_running

    @property
    def num_waiting(self) -> int:
        """Sequences that are not in the batch yet, the remote ones included."""
        return len(self._table) - self.num_running

    @property
    def num_queued_tokens(self) -> int:
        """Tokens that are still to be computed here before their sequence's next token."""
        # Copied at once: scrapes come from another thread.
        waiting, running = list(self._table.waiting), list(self._table.running)
        to_compute = sum(max(0, s.num_known - s.num_computed) for s in running)
        return to_compute + sum(s.num_tokens for s in waiting)

    @property
    def reserve_blocks(self) -> int:
        """Blocks that stay back per running sequence and group; more after a preemption."""
        return self._budget.reserve_blocks

    @property
    def num_preemptions(self) -> int:
        """Sequences that gave their blocks up, since the start."""
        return self._table.num_preemptions

    def check_invariants(self) -> None:
        """Assert the invariants above: for tests and an idle worker."""
        self._table.check_invariants()
        self._blocks.check_invariants()
