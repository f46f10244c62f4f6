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
from core.errors import OutOfBlocksError, RequestError
from core.ids import BlockId, Generation, OperationId, Owner, StepSeq
from core.kv_layout import KVLayout
from core.messages import FinishReason
from decode.kv_budget import KVBudget
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
        self._config = config
        self._table = SequenceTable(blocks, self._budget, max_num_seqs=config.max_num_seqs)
        self._steps: dict[StepSeq, list[StepPart]] = {}
        self._arrivals = itertools.count()
        self._refused: dict[Owner, int] = {}  # remote, by arrival: no memory for a first ticket

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
            self._pin_prefix(sequence)
        else:
            self._budget.fetch(sequence)
        self._table.add(sequence)

    def _pin_prefix(self, sequence: Sequence) -> None:
        """Pin the hit if all the rest can be promised; whoever holds blocks never waits.

        Not while an older remote sequence has no promise: prefill works in order, so this one
        would hold memory here while it waits there behind the older one, which waits for memory
        here.
        """
        cached = 0 if self._table.has_unpromised_remote else self._budget.usable_hit(sequence)
        num_tokens = sequence.num_tokens
        need = self._budget.blocks_to_receive(num_tokens, num_cached=cached)
        if cached:
            pinned = self._budget.cost(sequence, num_cached=cached, num_tokens=cached)
            if pinned + need > self._available():
                cached = 0
        self._budget.admit(sequence, num_cached=cached, num_tokens=cached)
        if cached:
            self._budget.promise(sequence, need)

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
        sequence = self._table[owner]
        targets = list(targets)
        if sequence.promised_blocks is None:
            need = self._budget.blocks_to_receive(sequence.num_tokens)
            if self._is_preempted_one_waiting() or need > self._available():
                self._refused[owner] = sequence.arrival
                return None
            self._refused.pop(owner, None)
            self._budget.promise(sequence, need)
        num_new = self._blocks.num_vacant(owner, targets)
        try:
            blocks = self._blocks.begin_receive(owner, targets, operation)
        except OutOfBlocksError:
            return None
        self._budget.promise(sequence, max((sequence.promised_blocks or 0) - num_new, 0))
        return blocks

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
        self._refused.pop(owner, None)
        self._table.recompute(self._table[owner])

    def lose_prefill(self, owner: Owner) -> None:
        """End a remote sequence whose KV will not come."""
        self._end(self._table[owner], Event.PREFILL_LOST)

    def _end(self, sequence: Sequence, event: Event) -> tuple[Action, ...]:
        self._refused.pop(sequence.owner, None)
        self._budget.forget(sequence)
        return self._table.end(sequence, event)

    def get(self, owner: Owner) -> Sequence | None:
        """Return the live sequence of ``owner``."""
        return self._table.get(owner)

    # Steps

    def schedule(self) -> StepBatch | None:
        """Return the next step's batch, already dispatched in the block manager; None: no work."""
        self._take_loads()
        chosen, starved = self._choose_running()
        # Where blocks are short nobody new comes in, unless nothing else would ever run.
        openings = [] if starved and (chosen or self._steps) else self._admit(chosen)
        if not chosen:
            return None
        parts = [dispatch_part(sequence, num_tokens) for sequence, num_tokens in chosen]
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
        return len(self._table.running) + len(self._table.ready) + len(self._table.loading)

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

    # Choosing

    def _choose_running(self) -> tuple[list[tuple[Sequence, int]], bool]:
        """Decode tokens of running sequences first, then chunks of their prompts.

        Returns also whether some sequence lacked a block: then nobody new is admitted.

        A sequence that lacks a block takes it from the youngest one, by preemption. While that one
        is in a dispatched step its blocks would stay fenced and preempting it would gain nothing
        (A15): it sits this step out, unharmed, and is preempted once its steps have completed.
        """
        chosen: list[tuple[Sequence, int]] = []
        num_preemptions = self.num_preemptions
        budget = self._config.max_batch_tokens
        resting: set[Owner] = set()
        decoding = [s for s in self._table.running if s.num_computed >= s.num_known]
        prefilling = [s for s in self._table.running if s.num_computed < s.num_known]
        for sequence in [*decoding, *prefilling]:
            if budget == 0:
                break
            if sequence.state is not State.RUNNING or sequence.owner in resting:
                continue
            num_tokens = min(sequence.num_known - sequence.num_computed, budget)
            if num_tokens <= 0:
                if not sequence.wants_token:
                    continue
                num_tokens = 1
            if not self._make_room(sequence, num_tokens, resting):
                continue
            chosen.append((sequence, num_tokens))
            budget -= num_tokens
        kept = [
            (sequence, num_tokens)
            for sequence, num_tokens in chosen
            if sequence.state is State.RUNNING and sequence.owner not in resting
        ]
        return kept, bool(resting) or self.num_preemptions > num_preemptions

    def _make_room(self, sequence: Sequence, num_tokens: int, resting: set[Owner]) -> bool:
        """Give ``sequence`` its blocks, from victims if need be; False: not in this step."""
        end = sequence.num_computed + num_tokens
        while end > sequence.num_covered:
            try:
                sequence.num_covered = self._blocks.grow(sequence.owner, end)
            except OutOfBlocksError:
                victim = self._table.ready[-1] if self._table.ready else self._table.running[-1]
                # What is being loaded can give its blocks up soon: better than giving up oneself.
                is_last_resort = victim is sequence and bool(self._table.loading)
                if victim.num_steps_in_flight or victim.owner in resting or is_last_resort:
                    resting.add(victim.owner)
                    return False
                self._table.preempt(victim)
                if victim is sequence:
                    return False
            else:
                self._keep_promise(sequence)
        return True

    def _keep_promise(self, sequence: Sequence) -> None:
        """A sequence that was promised room for all of its chunks got some of it."""
        if sequence.promised_blocks:
            rest = self._budget.blocks_to_come(
                num_covered=sequence.num_covered, num_tokens=sequence.num_known
            )
            if rest:
                self._budget.promise(sequence, rest)
            else:
                self._budget.close_promise(sequence)

    def _admit(self, chosen: list[tuple[Sequence, int]]) -> list[SlotOpening]:
        """Add READY and WAITING sequences to ``chosen`` while tokens, slots and blocks last."""
        budget = self._config.max_batch_tokens - sum(num_tokens for _, num_tokens in chosen)
        openings: list[SlotOpening] = []
        while budget and self._table.free_slots and self._table.ready:
            # Received and loaded KV goes first: it holds blocks, and needs little more (C19).
            sequence = self._table.ready[0]
            try:
                self._blocks.grow(sequence.owner, sequence.num_known)
            except OutOfBlocksError:
                if chosen or self._steps:
                    return openings  # what runs will give blocks back
                self._table.preempt(self._table.ready[-1])
                continue
            openings.append(self._start(sequence))
            num_tokens = min(sequence.num_known - sequence.num_computed, budget)
            chosen.append((sequence, num_tokens))
            budget -= num_tokens
        while budget and self._table.has_room and (sequence := self._next_waiting()) is not None:
            if not self._admit_waiting(sequence, budget):
                break
            if sequence.state is State.LOADING:
                continue
            openings.append(self._start(sequence))
            num_tokens = min(sequence.num_known - sequence.num_computed, budget)
            chosen.append((sequence, num_tokens))
            budget -= num_tokens
        return openings

    def _admit_waiting(self, sequence: Sequence, num_chunk: int) -> bool:
        """Allocate what ``sequence`` needs; False, without a trace: not now.

        All of its known tokens have room, or, with windows, those of its first chunk of at most
        ``num_chunk`` tokens, and what the others need is promised.
        """
        num_tokens = sequence.num_tokens
        is_new = not sequence.num_preemptions
        if is_new and any(arrival < sequence.arrival for arrival in self._refused.values()):
            return False  # an older one waits for memory that its first ticket needs
        if self._budget.is_closed(num_running=self.num_running):
            return False  # before anything is looked up
        cached = self._budget.usable_hit(sequence)
        end = self._budget.first_chunk_end(sequence, num_cached=cached, num_chunk=num_chunk)
        cost = self._budget.cost(sequence, num_cached=cached, num_tokens=end)
        to_come = self._budget.blocks_to_come(num_covered=end, num_tokens=num_tokens)
        if cost + to_come > self._available():
            return False
        load = self._budget.admit_or_load(sequence, num_cached=cached, num_tokens=end)
        if to_come:
            self._budget.promise(sequence, to_come, is_running=True)
        sequence.num_known = num_tokens
        if load is not None:
            self._table.begin_load(sequence, load)
        return True

    def _next_waiting(self) -> Sequence | None:
        """Return the first that waits for blocks only: who waits for storage is passed."""
        return next((s for s in self._table.waiting if not self._budget.is_fetching(s)), None)

    def _take_loads(self) -> None:
        """Look at the loads that have ended."""
        for load in self._budget.take_ended_loads():
            sequence = self._table.loading.get(load.operation)
            if sequence is None:
                continue  # ended meanwhile
            if not load.failed:
                self._budget.settle_load(sequence, load.num_tokens)
            self._table.end_load(sequence, failed=load.failed)

    def _is_preempted_one_waiting(self) -> bool:
        return bool(self._table.waiting) and self._table.waiting[0].num_preemptions > 0

    def _available(self) -> int:
        return self._budget.available(num_running=self.num_running)

    def _start(self, sequence: Sequence) -> SlotOpening:
        return SlotOpening(
            slot=self._table.start(sequence),
            sampling=sequence.sampling,
            prompt_token_ids=sequence.prompt_token_ids,
            output_token_ids=tuple(sequence.output_token_ids),
        )
