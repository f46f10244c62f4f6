"""Which prompt chunks a prefill worker computes in the next step. Pure: no clock, no I/O."""

from collections.abc import Iterator
from dataclasses import dataclass

from blockmgr.block_manager import BlockManager
from blockmgr.tiers import Tiers
from blockmgr.token_run import TokenRun, namespace_of
from blockmgr.window import needed_blocks
from core.config import SchedulerConfig
from core.errors import InternalError, RequestError
from core.ids import BlockId, Owner, Slot, StepSeq
from core.kv_layout import KVLayout
from core.messages import FirstToken, GroupBlocks, Prefill
from engine.batch import SequenceInput, SlotOpening, StepBatch, StepOutput
from prefill.prompt import Prompt
from prefill.prompt_queue import PromptQueue


@dataclass(frozen=True, slots=True)
class SettledChunk:
    """KV that has settled and is not ticketed yet: the content of the next ticket."""

    prompt: Prompt
    chunk: int
    blocks: tuple[GroupBlocks, ...]
    num_tokens: int
    first_token: FirstToken | None
    """Set with the last offer of a prompt, which is LEASED from now on."""


@dataclass(frozen=True, slots=True)
class _Part:
    prompt: Prompt
    slot: Slot
    position: int
    num_tokens: int

    @property
    def is_last(self) -> bool:
        return self.position + self.num_tokens == self.prompt.num_tokens


class PrefillScheduler:
    """Owns the prompts until their last offer; after that the block manager's lease does.

    Invariants (``check_invariants``):
        * a prompt in the queue owns no block, a prompt in the batch owns all its blocks;
        * a slot belongs to at most one prompt.
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
        self._layout = layout
        self._config = config
        self._fingerprint = fingerprint
        self._num_blocks = blocks.num_blocks
        self._queue = PromptQueue(blocks, layout, tiers)
        self._running: list[Prompt] = []
        self._prompt_of: dict[Owner, Prompt] = {}
        self._free_slots = [Slot(index) for index in reversed(range(config.max_num_seqs))]
        self._steps: dict[StepSeq, list[_Part]] = {}

    def add(self, request: Prefill) -> None:
        """Queue a prompt.

        Raises:
            RequestError: it can never fit into the pool. Nothing was taken.
        """
        token_ids = (*request.prompt_token_ids, *request.output_token_ids)
        if not 0 <= request.first_token < len(token_ids):
            raise RequestError(
                f"first_token={request.first_token} is not a position of {len(token_ids)} tokens",
                field="prompt",
            )
        need = self._blocks_for(len(token_ids))
        if need > self._num_blocks:
            raise RequestError(
                f"a prompt of {len(token_ids)} tokens needs {need} KV blocks, the prefill pool "
                f"has {self._num_blocks}; shorten the prompt",
                field="prompt",
            )
        namespace = namespace_of(fingerprint=self._fingerprint, salt=request.cache_salt)
        run = TokenRun(namespace, self._layout.block_size, token_ids)
        prompt = Prompt((request.request_id, request.attempt), request, token_ids, run)
        self._prompt_of[prompt.owner] = prompt
        self._queue.add(prompt)

    def cancel(self, owner: Owner) -> bool:
        """End a prompt that is queued or computing; its blocks are released now.

        Returns False where it is unknown here: finished, leased, or never seen.
        """
        prompt = self._prompt_of.pop(owner, None)
        if prompt is None:
            return False
        if prompt in self._running:
            self._running.remove(prompt)
            self._blocks.release(owner)
            self._free_slot(prompt)
        else:
            self._queue.remove(prompt)
        return True

    def schedule(self) -> StepBatch | None:
        """Return the next step's batch, already dispatched in the block manager; None: no work."""
        self._queue.take_loads()
        budget = self._config.max_batch_tokens
        openings: list[SlotOpening] = []
        parts: list[_Part] = []
        for prompt in self._running:
            num_tokens = min(prompt.num_tokens - prompt.num_computed, budget)
            if num_tokens > 0:
                parts.append(_part_of(prompt, num_tokens))
                budget -= num_tokens
        while budget and (prompt := self._next_prompt()) is not None:
            openings.append(self._start(prompt))
            num_tokens = min(prompt.num_tokens - prompt.num_computed, budget)
            parts.append(_part_of(prompt, num_tokens))
            budget -= num_tokens
        if not parts:
            return None
        for part in parts:
            part.prompt.num_computed += part.num_tokens
        step = self._blocks.dispatch_step(part.prompt.owner for part in parts)
        self._steps[step] = parts
        return StepBatch(
            step=step,
            openings=tuple(openings),
            sequences=tuple(self._input_of(part) for part in parts),
            zero_blocks=self._blocks.take_zero_list(),
        )

    def step_parts(self, step: StepSeq) -> list[tuple[Prompt, range]]:
        """Return which tokens of which prompts a step in flight computes."""
        return [
            (part.prompt, range(part.position, part.position + part.num_tokens))
            for part in self._steps[step]
        ]

    def complete(self, output: StepOutput) -> list[SettledChunk]:
        """Take a completed step's output and return what can be ticketed now."""
        parts = self._steps.pop(output.step)
        self._blocks.complete_step(output.step)
        token_of_slot = {token.slot: token for token in output.tokens}
        offers: list[SettledChunk] = []
        for part in parts:
            prompt = part.prompt
            if self._prompt_of.get(prompt.owner) is not prompt:
                continue  # cancelled while the step ran
            prompt.num_settled += part.num_tokens
            self._blocks.settle(prompt.owner, prompt.num_settled)
            first_token = None
            if part.is_last:
                token = token_of_slot[part.slot]
                first_token = FirstToken(token_id=token.token_id, logprobs=token.logprobs)
            offer = self._offer(prompt, first_token)
            if offer is not None:
                offers.append(offer)
            if first_token is not None:
                self._finish(prompt)
        return offers

    def fail_step(self, step: StepSeq) -> None:
        """Retire a step that died, after the device was drained."""
        self._steps.pop(step)
        self._blocks.fail_step(step)

    @property
    def num_running(self) -> int:
        """Prompts that own their blocks."""
        return len(self._running) + self._queue.num_admitted

    @property
    def num_waiting(self) -> int:
        """Prompts in the queue."""
        return self._queue.num_waiting

    @property
    def num_queued_tokens(self) -> int:
        """Tokens still to be dispatched."""
        prompts = list(self._prompt_of.values())  # at once: scrapes come from another thread
        return sum(p.num_tokens - p.num_computed for p in prompts)

    @property
    def owners(self) -> list[Owner]:
        """Of all prompts queued or computing."""
        return list(self._prompt_of)

    def check_invariants(self) -> None:
        """Assert the invariants above: for tests and an idle worker."""
        slots = [p.slot for p in self._running if p.slot is not None] + self._free_slots
        assert sorted(slots) == list(range(self._config.max_num_seqs)), f"slots lost: {slots}"
        self._queue.check_invariants()
        assert all(self._blocks.holds(prompt.owner) for prompt in self._running)
        self._blocks.check_invariants()

    def _next_prompt(self) -> Prompt | None:
        if not self._free_slots:
            return None
        return self._queue.next(num_running=len(self._running), num_slots=len(self._free_slots))

    def _start(self, prompt: Prompt) -> SlotOpening:
        self._running.append(prompt)
        prompt.slot = self._free_slots.pop()
        return SlotOpening(
            slot=prompt.slot,
            sampling=prompt.request.sampling,
            prompt_token_ids=prompt.request.prompt_token_ids,
            output_token_ids=prompt.request.output_token_ids,
        )

    def _input_of(self, part: _Part) -> SequenceInput:
        return SequenceInput(
            slot=part.slot,
            token_ids=part.prompt.token_ids[part.position : part.position + part.num_tokens],
            position=part.position,
            block_tables=self._blocks.block_tables(part.prompt.owner),
            sample=part.is_last,
        )

    def _offer(self, prompt: Prompt, first_token: FirstToken | None) -> SettledChunk | None:
        """Name the full blocks settled since the last offer; the last offer names all the rest."""
        block_size = self._layout.block_size
        last = first_token is not None
        end = prompt.num_tokens if last else prompt.num_settled // block_size * block_size
        if end <= prompt.num_offered and not last:
            return None
        blocks = tuple(
            named
            for group in range(len(self._layout.groups))
            for named in self._name_blocks(prompt, group, end)
        )
        prompt.num_offered = max(end, prompt.num_offered)
        if not blocks and not last:
            return None  # all behind the windows that the whole prompt leaves open
        offer = SettledChunk(prompt, prompt.num_chunks_offered, blocks, end, first_token)
        prompt.num_chunks_offered += 1
        return offer

    def _name_blocks(self, prompt: Prompt, group: int, end: int) -> Iterator[GroupBlocks]:
        """Blocks of ``group`` from the last offer up to ``end`` that decode will ever read.

        Behind the window that the whole prompt leaves open, nothing is advertised.
        """
        block_size = self._layout.block_size
        start = prompt.num_offered // block_size
        stop = self._layout.num_blocks_for(end)
        table = self._blocks.block_tables(prompt.owner)[group]
        for run in needed_blocks(self._layout.groups[group], block_size, prompt.num_tokens):
            first, last = max(run.start, start), min(run.stop, stop)
            if first < last:
                block_ids = [BlockId(block_id) for block_id in table[first:last].tolist()]
                yield GroupBlocks(
                    group=group,
                    first_index=first,
                    block_ids=tuple(block_ids),
                    generations=tuple(map(self._blocks.generation, block_ids)),
                )

    def _finish(self, prompt: Prompt) -> None:
        """All is offered: from now on the blocks wait for their reader."""
        self._running.remove(prompt)
        del self._prompt_of[prompt.owner]
        self._free_slot(prompt)
        self._blocks.lease(prompt.owner)

    def _free_slot(self, prompt: Prompt) -> None:
        if prompt.slot is not None:
            self._free_slots.append(prompt.slot)
            prompt.slot = None

    def _blocks_for(self, num_tokens: int) -> int:
        return len(self._layout.groups) * self._layout.num_blocks_for(num_tokens)


def _part_of(prompt: Prompt, num_tokens: int) -> _Part:
    if prompt.slot is None:
        raise InternalError(f"{prompt.owner} was scheduled without a slot")
    return _Part(prompt, prompt.slot, prompt.num_computed, num_tokens)
