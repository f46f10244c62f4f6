"""What a decode worker's pool can still take: reserves for what runs and what is receiving."""

from blockmgr.admission import Admission, GrowthReserve
from blockmgr.block_manager import BlockManager
from blockmgr.tiers import EndedLoad, LoadedAdmission, Tiers
from blockmgr.token_run import TokenRun, namespace_of
from blockmgr.window import blocks_to_come, needed_blocks
from core.config import SchedulerConfig
from core.ids import OperationId
from core.kv_layout import KVLayout
from decode.sequence import Sequence


class KVBudget:
    """Counts of one pool, and the token runs by which its blocks are shared.

    Who may come in is decided by ``blockmgr.admission``; this knows the pool and the sequences.
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
        self._tiers = tiers
        self._blocks = blocks
        self._layout = layout
        self._fingerprint = fingerprint
        self._has_windows = any(group.window is not None for group in layout.groups)
        # What the windows of a step leave behind stays FENCED by the steps behind it, so of depth
        # d up to 2 d - 1 steps' tokens are held; ``blocks_to_come`` has one of them as slack.
        depth = config.overlap_depth
        self._num_unsettled = config.max_batch_tokens * max(depth, 2 * depth - 2)
        self._reserve = GrowthReserve(
            initial=config.reserve_blocks_initial,
            minimum=config.reserve_blocks_min,
            decay_steps=config.reserve_decay_steps,
        )
        self._admission = Admission(self._reserve, num_groups=len(layout.groups))
        self.num_blocks = blocks.num_blocks

    @property
    def promised(self) -> int:
        """Blocks that are free now, but reserved for KV that is still to be received."""
        return self._admission.promised

    @property
    def reserve_blocks(self) -> int:
        """Blocks that stay back per running sequence and group."""
        return self._reserve.blocks

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks, over all groups, that hold ``num_tokens`` tokens."""
        return len(self._layout.groups) * self._layout.num_blocks_for(num_tokens)

    def blocks_to_receive(self, num_tokens: int, *, num_cached: int = 0) -> int:
        """Blocks that tickets for ``num_tokens`` tokens name: what no window has left behind.

        The first ``num_cached`` are here: a whole number of blocks.
        """
        size = self._layout.block_size
        return sum(
            len(range(max(run.start, num_cached // size), run.stop))
            for group in self._layout.groups
            for run in needed_blocks(group, size, num_tokens)
        )

    def first_chunk_end(self, sequence: Sequence, *, num_cached: int, num_chunk: int) -> int:
        """Return how many tokens of ``sequence`` get blocks at admission.

        With windows, those of the first chunk of at most ``num_chunk`` tokens: until the rest is
        computed, some of the first blocks are behind a window. What a tier loads has room at once.
        """
        num_tokens = sequence.num_tokens
        if not self._has_windows or self.loadable_hit(sequence, num_cached) > num_cached:
            return num_tokens
        return min(num_tokens, num_cached + num_chunk)

    def blocks_to_come(self, *, num_covered: int, num_tokens: int) -> int:
        """Blocks that a sequence needs beyond ``num_covered`` tokens while it is computed here."""
        if num_covered >= num_tokens:
            return 0
        return sum(
            blocks_to_come(
                group,
                self._layout.block_size,
                num_covered=num_covered,
                num_tokens=num_tokens,
                num_unsettled=self._num_unsettled,
            )
            for group in self._layout.groups
        )

    def available(self, *, num_running: int) -> int:
        """Blocks for newcomers, beside all that is promised, and reserved for growth."""
        return self._admission.room(self._blocks.num_allocatable, num_running=num_running)

    def is_closed(self, *, num_running: int) -> bool:
        """Whether not even a newcomer whose whole prefix is shared fits: it needs a last block."""
        return self.available(num_running=num_running) < len(self._layout.groups)

    def promise(self, sequence: Sequence, num_blocks: int, *, is_running: bool = False) -> None:
        """Change what is reserved for ``sequence`` to ``num_blocks``: received, or in chunks."""
        self._admission.promise(sequence.owner, num_blocks, is_running=is_running)
        sequence.promised_blocks = num_blocks

    def close_promise(self, sequence: Sequence) -> None:
        """Nothing stays reserved for ``sequence``: it has everything, or is gone."""
        self._admission.close(sequence.owner)
        sequence.promised_blocks = 0

    def count_step(self) -> None:
        """A step was dispatched: the reserve for growth may get smaller."""
        self._reserve.step()

    def count_preemption(self) -> None:
        """Too much was admitted: the reserve for growth is what it was at first."""
        self._reserve.preempted()

    def usable_hit(self, sequence: Sequence) -> int:
        """Cached tokens of ``sequence``; the last token is always computed, to sample from it."""
        return self._blocks.count_cached_tokens(self.run_of(sequence), sequence.num_tokens - 1)

    def cost(self, sequence: Sequence, *, num_cached: int, num_tokens: int) -> int:
        """Blocks of ``available`` that ``admit`` would take; shared ones cost nothing."""
        return self._blocks.admission_cost(
            sequence.owner,
            tokens=self.run_of(sequence),
            num_cached_tokens=num_cached,
            num_tokens=num_tokens,
        )

    def admit(self, sequence: Sequence, *, num_cached: int, num_tokens: int) -> None:
        """Pin ``num_cached`` tokens of the prefix cache and allocate up to ``num_tokens``.

        Raises:
            OutOfBlocksError: nothing was taken.
        """
        self._blocks.admit(
            sequence.owner,
            tokens=self.run_of(sequence),
            num_cached_tokens=num_cached,
            num_tokens=num_tokens,
        )
        self._start_at(sequence, num_cached)

    def fetch(self, sequence: Sequence) -> None:
        """Begin to look in storage for what this worker lacks of ``sequence``."""
        if self._tiers is not None:
            run = self.run_of(sequence)
            self._tiers.fetch(sequence.owner, run, sequence.num_tokens - 1)

    def is_fetching(self, sequence: Sequence) -> bool:
        """Whether KV of ``sequence`` is on its way from storage. Bounded in time."""
        return self._tiers is not None and self._tiers.is_fetching(sequence.owner)

    def forget(self, sequence: Sequence) -> None:
        """``sequence`` is gone: it waits for no storage any more."""
        if self._tiers is not None:
            self._tiers.forget(sequence.owner)

    def loadable_hit(self, sequence: Sequence, num_cached: int) -> int:
        """How far the hit of ``num_cached`` tokens goes on in host memory; at least as far."""
        if self._tiers is None or not sequence.may_load:
            return num_cached
        run = self.run_of(sequence)
        return self._tiers.count_tokens(run, num_cached, sequence.num_tokens - 1)

    def admit_or_load(
        self, sequence: Sequence, *, num_cached: int, num_tokens: int
    ) -> OperationId | None:
        """As ``admit``, and begin to load what host memory has behind the hit.

        Returns:
            The load, before whose end nothing of ``sequence`` may be computed; None: there is none.

        Raises:
            OutOfBlocksError: nothing was taken.
        """
        num_loaded = self.loadable_hit(sequence, num_cached)
        if self._tiers is None or num_loaded == num_cached:
            self.admit(sequence, num_cached=num_cached, num_tokens=num_tokens)
            return None
        admission = LoadedAdmission(self.run_of(sequence), num_cached, num_loaded, num_tokens)
        operation = self._tiers.admit(sequence.owner, admission)
        self._start_at(sequence, num_cached)
        return operation

    def take_ended_loads(self) -> list[EndedLoad]:
        """Return the loads that ended since the last call."""
        return [] if self._tiers is None else self._tiers.take_ended_loads()

    def settle_load(self, sequence: Sequence, num_tokens: int) -> None:
        """The first ``num_tokens`` of ``sequence`` are here."""
        self._start_at(sequence, num_tokens)
        self._blocks.settle(sequence.owner, num_tokens)

    def settle(self, sequence: Sequence, num_new: int) -> None:
        """The last ``num_new`` of ``num_settled`` tokens have settled: share and prune blocks."""
        block_size = self._layout.block_size
        before = sequence.num_settled - num_new
        if self._has_windows or sequence.num_settled // block_size > before // block_size:
            self.run_of(sequence)
            self._blocks.settle(sequence.owner, sequence.num_settled)

    def run_of(self, sequence: Sequence) -> TokenRun:
        """Return the tokens of ``sequence`` that are known, as far as the block manager sees."""
        run = sequence.run
        if run is None:
            namespace = namespace_of(fingerprint=self._fingerprint, salt=sequence.cache_salt)
            run = sequence.run = TokenRun(
                namespace, self._layout.block_size, sequence.prompt_token_ids
            )
        run.extend(sequence.output_token_ids[len(run) - len(sequence.prompt_token_ids) :])
        return run

    def _start_at(self, sequence: Sequence, num_tokens: int) -> None:
        sequence.num_computed = sequence.num_settled = num_tokens
        sequence.num_covered = 0
        if sequence.num_preemptions == 0:
            sequence.num_cached_tokens = num_tokens
