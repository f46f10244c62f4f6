"""Which prompt chunks a prefill worker computes in the next step. Pure: no clock, no I/O."""

from dataclasses import dataclass

from blockmgr.block_manager import BlockManager
from blockmgr.tiers import Tiers
from blockmgr.token_run import TokenRun, namespace_of
from core.config import SchedulerConfig
from core.errors import InternalError, RequestError
from core.ids import Owner, Slot, StepSeq
from core.kv_layout import KVLayout
from core.messages import FirstToken, Prefill
from engine.batch import SequenceInput, SlotOpening, StepBatch, StepOutput
from prefill.offers import Offers, SettledChunk
from prefill.prompt import Prompt
from prefill.prompt_queue import PromptQueue


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
        layer_ranges: int = 1,
    ) -> None:
        """Begin without a prompt.

        Args:
            blocks: Of this worker's pool.
            layout: Of the same.
            config: Sizes of a step.
            fingerprint: Of the model: whose KV the prefix cache has.
            tiers: Below the pool; None: there are none.
            layer_ranges: In how many parts the last chunk of a prompt is offered.
        """
        self._blocks = blocks
        self._layout = layout
        self._config = config
        self._fingerprint = fingerprint
        self._num_blocks = blocks.num_blocks
        self._offers = Offers(blocks, layout, layer_ranges=layer_ranges)
        self._queue = PromptQueue(blocks, layout, tiers)
        self._running: list[Prompt] = []
        self._prompt_of: dict[Owner, Prompt] = {}
        self._free_slots = [Slot(index) for index in reversed(range(config.max_num_seqs))]
        self._steps: dict[StepSeq, list[_Part]] = {}

    def add(self, request: Prefill) -> None:
        """Queue a prompt.

        Raises:
            RequestError: it is empty, or can never fit into the pool. Nothing was taken.
        """
        if not request.prompt_token_ids:
            raise RequestError("prompt is empty; send at least one token", field="prompt")
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
            layer_marks=self._offers.marks if any(part.is_last for part in parts) else (),
        )

    def step_parts(self, step: StepSeq) -> list[tuple[Prompt, range]]:
        """Return which tokens of which prompts a step in flight computes."""
        return [
            (part.prompt, range(part.position, part.position + part.num_tokens))
            for part in self._steps[step]
        ]

    def layers_done(self, step: StepSeq, mark: int) -> list[SettledChunk]:
        """Return what can be ticketed since ``step``, in flight, has completed layer ``mark``.

        Nothing settles by that: whole blocks are shared, and windows move, when the step has
        completed.
        """
        offers = [
            self._offers.layers_done(part.prompt, mark)
            for part in self._steps[step]
            if part.is_last and self._is_computing(part)
        ]
        return [offer for offer in offers if offer is not None]

    def _is_computing(self, part: _Part) -> bool:
        """Whether all before ``part`` has settled, and its prompt was not cancelled meanwhile."""
        prompt = part.prompt
        is_live = self._prompt_of.get(prompt.owner) is prompt
        return is_live and prompt.num_settled == part.position

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
            if part.is_last:
                token = token_of_slot[part.slot]
                first_token = FirstToken(token_id=token.token_id, logprobs=token.logprobs)
                offers.append(self._offers.finished(prompt, first_token))
                self._finish(prompt)
            elif (offer := self._offers.settled(prompt)) is not None:
                offers.append(offer)
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
