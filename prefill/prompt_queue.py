"""Prompts that wait for blocks, or for KV that a tier has: first come, first served.

Pure: no clock, no I/O. A prompt's blocks are allocated whole at its admission, so two half-computed
prompts cannot wait for each other; until then it is a line in the queue and costs no memory.
"""

from collections import deque

from blockmgr.admission import Admission, GrowthReserve
from blockmgr.block_manager import BlockManager
from blockmgr.tiers import LoadedAdmission, Tiers
from core.ids import OperationId
from core.kv_layout import KVLayout
from prefill.prompt import Prompt


class PromptQueue:
    """Every prompt before its first step.

        ──add──> waiting ──admitted──────────────────────> out
                  ^   └──admitted, a tier has more──> loading ──loaded──> loaded ──> out
                  └───────────────failed──────────────────┘

    A prompt in ``waiting`` owns no block, one in ``loading`` or ``loaded`` all of its blocks. One
    whose KV is on its way from storage is passed by those behind it, for a bounded time. If its
    reader has pinned a prefix for it, those behind it wait too: the reader keeps memory for all the
    rest of it, so one that passed could wait there for that memory, holding blocks here that this
    one needs.
    """

    def __init__(self, blocks: BlockManager, layout: KVLayout, tiers: Tiers | None) -> None:
        self._blocks = blocks
        self._layout = layout
        self._tiers = tiers
        # A prompt is admitted whole and does not grow, so nothing stays back for what runs.
        self._admission = Admission(
            GrowthReserve(initial=0, minimum=0, decay_steps=1), num_groups=len(layout.groups)
        )
        self._waiting: deque[Prompt] = deque()
        self._loading: dict[OperationId, Prompt] = {}
        self._loaded: deque[Prompt] = deque()

    @property
    def num_waiting(self) -> int:
        """Prompts without blocks."""
        return len(self._waiting)

    @property
    def num_admitted(self) -> int:
        """Prompts that own their blocks and wait for a load or a slot."""
        return len(self._loading) + len(self._loaded)

    def add(self, prompt: Prompt) -> None:
        """Queue a prompt, and begin to look for its KV in storage."""
        self._waiting.append(prompt)
        if self._tiers is not None:
            self._tiers.fetch(prompt.owner, prompt.run, prompt.num_tokens - 1)

    def remove(self, prompt: Prompt) -> None:
        """Take out a prompt that is here; its blocks, if it has any, are released now."""
        if self._tiers is not None:
            self._tiers.forget(prompt.owner)
        if prompt in self._waiting:
            self._waiting.remove(prompt)
            return
        if prompt in self._loaded:
            self._loaded.remove(prompt)
        else:
            self._loading = {op: other for op, other in self._loading.items() if other != prompt}
        self._blocks.release(prompt.owner)

    def next(self, *, num_running: int, num_slots: int) -> Prompt | None:
        """Return the next prompt whose blocks are its own and whose load is over; None: not now.

        Args:
            num_running: Prompts that were returned and still compute.
            num_slots: Prompts that could be returned now; no more than these are being loaded.
        """
        if self._loaded:
            return self._loaded.popleft()
        for prompt in list(self._waiting):
            if len(self._loading) >= num_slots:
                return None
            if self._tiers is not None and self._tiers.is_fetching(prompt.owner):
                if prompt.is_pinned_at_reader:
                    return None
                continue
            room = self._admission.room(self._blocks.num_allocatable, num_running=num_running)
            if not self._admit(prompt, room):
                return None
            self._waiting.remove(prompt)
            if prompt not in self._loading.values():
                return prompt
        return None

    def take_loads(self) -> None:
        """Look at the loads that have ended."""
        if self._tiers is None:
            return
        for load in self._tiers.take_ended_loads():
            prompt = self._loading.pop(load.operation, None)
            if prompt is None:
                continue  # cancelled meanwhile
            if load.failed:
                self._blocks.release(prompt.owner)
                prompt.may_load = False
                self._waiting.appendleft(prompt)
                continue
            self._blocks.settle(prompt.owner, load.num_tokens)
            prompt.start_at(load.num_tokens)
            self._loaded.append(prompt)

    def check_invariants(self) -> None:
        """Assert who owns blocks: for tests and an idle worker."""
        assert not any(self._blocks.holds(prompt.owner) for prompt in self._waiting)
        admitted = [*self._loading.values(), *self._loaded]
        assert all(self._blocks.holds(prompt.owner) for prompt in admitted)

    def _admit(self, prompt: Prompt, room: int) -> bool:
        """Allocate all of ``prompt``; False, without a trace: not now."""
        if room < len(self._layout.groups):
            return False  # before anything is looked up: every prompt needs a last block
        # The last token is always computed: its logits give the first output token.
        most = prompt.num_tokens - 1
        cached = self._blocks.count_cached_tokens(prompt.run, most)
        cost = self._blocks.admission_cost(
            prompt.owner,
            tokens=prompt.run,
            num_cached_tokens=cached,
            num_tokens=prompt.num_tokens,
        )
        if cost > room:
            return False
        loaded = self._count_loadable(prompt, cached, most)
        if self._tiers is not None and loaded > cached:
            admission = LoadedAdmission(prompt.run, cached, loaded, prompt.num_tokens)
            self._loading[self._tiers.admit(prompt.owner, admission)] = prompt
        else:
            self._blocks.admit(
                prompt.owner,
                tokens=prompt.run,
                num_cached_tokens=cached,
                num_tokens=prompt.num_tokens,
            )
        prompt.start_at(cached)
        prompt.num_offered = prompt.request.first_token
        return True

    def _count_loadable(self, prompt: Prompt, cached: int, most: int) -> int:
        if self._tiers is None or not prompt.may_load:
            return cached
        return self._tiers.count_tokens(prompt.run, cached, most)
