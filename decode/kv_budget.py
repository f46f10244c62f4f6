"""What a decode worker's pool can still take: reserves for what runs and what is receiving."""

from blockmgr.admission import Admission, GrowthReserve
from blockmgr.block_manager import BlockManager
from blockmgr.token_run import TokenRun, namespace_of
from core.config import SchedulerConfig
from core.kv_layout import KVLayout
from decode.sequence import Sequence


class KVBudget:
    """Counts of one pool, and the token runs by which its blocks are shared.

    Who may come in is decided by ``blockmgr.admission``; this knows the pool and the sequences.
    """

    def __init__(
        self, blocks: BlockManager, layout: KVLayout, config: SchedulerConfig, *, fingerprint: str
    ) -> None:
        self._blocks = blocks
        self._layout = layout
        self._fingerprint = fingerprint
        self._has_windows = any(group.window is not None for group in layout.groups)
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

    def available(self, *, num_running: int) -> int:
        """Blocks for newcomers, beside all that is promised, and reserved for growth."""
        return self._admission.room(self._blocks.num_allocatable, num_running=num_running)

    def is_closed(self, *, num_running: int) -> bool:
        """Whether not even a newcomer whose whole prefix is shared fits: it needs a last block."""
        return self.available(num_running=num_running) < len(self._layout.groups)

    def promise(self, sequence: Sequence, num_blocks: int) -> None:
        """Change what is reserved for ``sequence``, which is received, to ``num_blocks``."""
        self._admission.promise(sequence.owner, num_blocks)
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
        sequence.num_computed = sequence.num_settled = num_cached
        if sequence.num_preemptions == 0:
            sequence.num_cached_tokens = num_cached

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
