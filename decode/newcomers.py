"""Who comes into the batch: sequences whose KV is here, then those that wait to be computed."""

from blockmgr.block_manager import BlockManager
from core.config import SchedulerConfig
from core.errors import OutOfBlocksError
from decode.kv_budget import KVBudget
from decode.remote_admission import RemoteAdmission
from decode.sequence import Sequence
from decode.sequence_table import SequenceTable
from decode.state import State
from decode.step_part import Chosen
from engine.batch import SlotOpening


class Newcomers:
    """Admits READY and WAITING sequences of one table. No state of its own."""

    def __init__(
        self,
        blocks: BlockManager,
        budget: KVBudget,
        table: SequenceTable,
        remote: RemoteAdmission,
        config: SchedulerConfig,
    ) -> None:
        self._blocks = blocks
        self._budget = budget
        self._table = table
        self._remote = remote
        self._max_batch_tokens = config.max_batch_tokens

    def admit(self, chosen: list[Chosen], *, is_step_in_flight: bool) -> list[SlotOpening]:
        """Add newcomers to ``chosen`` while tokens, slots and blocks last; return their openings.

        Where nothing is chosen and no step is in flight, nobody would ever give a block back: then
        READY sequences that lack one give up theirs, the youngest first.
        """
        budget = self._max_batch_tokens - sum(each.num_tokens for each in chosen)
        openings: list[SlotOpening] = []
        while budget and self._table.free_slots and self._table.ready:
            # Received and loaded KV goes first: it holds blocks, and needs little more (C19).
            sequence = self._table.ready[0]
            try:
                self._blocks.grow(sequence.owner, sequence.num_known)
            except OutOfBlocksError:
                if chosen or is_step_in_flight:
                    return openings  # what runs will give blocks back
                self._table.preempt(self._table.ready[-1])
                continue
            openings.append(self._start(sequence, chosen, budget))
            budget -= chosen[-1].num_tokens
        while budget and self._table.has_room and (sequence := self._next_waiting()) is not None:
            if not self._admit_waiting(sequence, budget):
                break
            if sequence.state is State.LOADING:
                continue
            openings.append(self._start(sequence, chosen, budget))
            budget -= chosen[-1].num_tokens
        return openings

    def take_loads(self) -> None:
        """Look at the loads that have ended."""
        for load in self._budget.take_ended_loads():
            sequence = self._table.loading.get(load.operation)
            if sequence is None:
                continue  # ended meanwhile
            if not load.failed:
                self._budget.settle_load(sequence, load.num_tokens)
            self._table.end_load(sequence, failed=load.failed)

    def _admit_waiting(self, sequence: Sequence, num_chunk: int) -> bool:
        """Allocate what ``sequence`` needs; False, without a trace: not now.

        All of its known tokens have room, or, with windows, those of its first chunk of at most
        ``num_chunk`` tokens, and what the others need is promised.
        """
        num_tokens = sequence.num_tokens
        if not sequence.num_preemptions and self._remote.has_refused_before(sequence):
            return False  # an older one waits for memory that its first ticket needs
        num_running = self._table.num_running
        if self._budget.is_closed(num_running=num_running):
            return False  # before anything is looked up
        cached = self._budget.usable_hit(sequence)
        end = self._budget.first_chunk_end(sequence, num_cached=cached, num_chunk=num_chunk)
        cost = self._budget.cost(sequence, num_cached=cached, num_tokens=end)
        to_come = self._budget.blocks_to_come(num_covered=end, num_tokens=num_tokens)
        if cost + to_come > self._budget.available(num_running=num_running):
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

    def _start(self, sequence: Sequence, chosen: list[Chosen], budget: int) -> SlotOpening:
        """Put ``sequence`` into the batch, with at most ``budget`` tokens in the next step."""
        slot = self._table.start(sequence)
        num_tokens = min(sequence.num_known - sequence.num_computed, budget)
        chosen.append(Chosen(sequence, num_tokens))
        return SlotOpening(
            slot=slot,
            sampling=sequence.sampling,
            prompt_token_ids=sequence.prompt_token_ids,
            output_token_ids=tuple(sequence.output_token_ids),
        )
