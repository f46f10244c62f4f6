"""Which running sequences the next step computes, and who gives blocks up for them."""

from typing import NamedTuple

from blockmgr.block_manager import BlockManager
from core.config import SchedulerConfig
from core.errors import OutOfBlocksError
from core.ids import Owner
from decode.kv_budget import KVBudget
from decode.sequence import Sequence
from decode.sequence_table import SequenceTable
from decode.state import State
from decode.step_part import Chosen


class Choice(NamedTuple):
    """What the next step computes of the sequences that run."""

    chosen: list[Chosen]
    is_starved: bool
    """Some sequence lacked a block: nobody new should come in."""


class RunningChoice:
    """Chooses among the running sequences of one table. No state of its own."""

    def __init__(
        self,
        blocks: BlockManager,
        budget: KVBudget,
        table: SequenceTable,
        config: SchedulerConfig,
    ) -> None:
        self._blocks = blocks
        self._budget = budget
        self._table = table
        self._max_batch_tokens = config.max_batch_tokens

    def choose(self) -> Choice:
        """Return decode tokens of running sequences first, then chunks of their prompts.

        A sequence that lacks a block takes it from the youngest one, by preemption. While that one
        is in a dispatched step its blocks would stay fenced and preempting it would gain nothing
        (A15): it sits this step out, unharmed, and is preempted once its steps have completed.
        """
        chosen: list[Chosen] = []
        num_preemptions = self._table.num_preemptions
        budget = self._max_batch_tokens
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
            chosen.append(Chosen(sequence, num_tokens))
            budget -= num_tokens
        kept = [
            each
            for each in chosen
            if each.sequence.state is State.RUNNING and each.sequence.owner not in resting
        ]
        return Choice(kept, bool(resting) or self._table.num_preemptions > num_preemptions)

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
