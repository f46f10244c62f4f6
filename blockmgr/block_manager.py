"""Who owns each KV block of a worker's pool, and until when something may still touch it."""

from collections.abc import Iterable
from typing import Final

import numpy as np

from blockmgr.block_operations import BlockOperations
from blockmgr.block_table import BlockTable
from blockmgr.free_queue import BlockIds
from blockmgr.holding import Holding
from blockmgr.states import Hold, HoldChange
from blockmgr.token_run import TokenRun
from blockmgr.window import next_change
from core.errors import DoubleReleaseError, InvalidTransitionError
from core.ids import BlockId, Owner, StepSeq

_OUTPUT_BLOCKS_PER_OFFER: Final = 8
_LEASE: Final = HoldChange(add=(Hold.LEASE,), drop=(Hold.OWNER,))
_LET_GO: Final = HoldChange(drop=(Hold.OWNER,))
_LET_GO_FENCED: Final = HoldChange(add=(Hold.STEP,), drop=(Hold.OWNER,))
_END_LEASE: Final = HoldChange(drop=(Hold.LEASE,))
_END_LEASE_FENCED: Final = HoldChange(add=(Hold.STEP,), drop=(Hold.LEASE,))
_PASS_FENCE: Final = HoldChange(drop=(Hold.STEP,))


class BlockManager(BlockOperations):
    """Owners, block tables, prefix sharing and fences over one pool. No bytes, no clock.

    Logical release is immediate; a block becomes FREE only when it has no owner and no lease,
    every dispatched step that may touch it has retired, and every operation that names it has
    ended. The two conditions are independent. The states are drawn in ``blockmgr.states``.

    Errors of the kind ``InternalError`` are the caller's bugs; the call that raises one has
    changed nothing but counters.

    Args:
        layout: Groups and block size.
        num_blocks: Size of the pool, shared by all groups.
        fences: Whether released blocks wait for steps (``fences.fences_needed``). Operations are
            always waited for.
        prefix_caching: Whether settled full blocks can be hit.
        zero_on_allocate: Whether ``take_zero_list`` lists new blocks.
        observers: Told of every change of a block's state. An evicted block becomes FREE before
            it is allocated.
        history: Told who has each block, for ``describe``; None: nobody wants to know.
    """

    # Requests

    def admit(
        self, owner: Owner, *, tokens: TokenRun | None, num_cached_tokens: int, num_tokens: int
    ) -> None:
        """Pin a hit of ``num_cached_tokens`` and allocate the rest of ``[0, num_tokens)``.

        In a group with a window, what lies behind the window of the hit's end is holes.

        Args:
            owner: Not held.
            tokens: What the blocks will hold, as far as it is known; the caller appends to it as
                more is known. None: nothing is shared.
            num_cached_tokens: As ``count_cached_tokens`` gave them, or fewer.
            num_tokens: Positions to cover.

        Raises:
            OutOfBlocksError: nothing was taken, pinned or reordered.
            InvalidTransitionError: ``owner`` is held, or the hit is not usable at this length.
        """
        if owner in self._holdings:
            raise InvalidTransitionError(f"{owner} is admitted already")
        holding = self._new_holding(owner, tokens, num_cached_tokens)
        pinned = self._allocator.admit(holding, self._layout.num_blocks_for(num_tokens))
        self._holdings[owner] = holding
        self._note_next_change(holding)
        self.stats.query_tokens += 0 if tokens is None else tokens.num_blocks * tokens.block_size
        self.stats.hit_tokens += num_cached_tokens
        if self._history is not None:
            self._history.owned(np.concatenate((pinned, holding.release_order)), owner)

    def admission_cost(
        self, owner: Owner, *, tokens: TokenRun | None, num_cached_tokens: int, num_tokens: int
    ) -> int:
        """Return how many allocatable blocks ``admit`` would take with these arguments.

        New blocks, and blocks of the hit that only the tree holds; a block that another owner
        holds costs nothing. Changes nothing.

        Raises:
            InvalidTransitionError: the hit is not usable at this length.
        """
        holding = self._new_holding(owner, tokens, num_cached_tokens)
        return self._allocator.cost(holding, self._layout.num_blocks_for(num_tokens))

    def grow(self, owner: Owner, num_tokens: int) -> int:
        """Cover the positions ``[0, num_tokens)`` of ``owner``.

        Positions of a window group that ``begin_receive`` skipped stay holes.

        Returns:
            The tokens that are covered now, to the end of the last block: who keeps them needs not
            ask again before.

        Raises:
            OutOfBlocksError: nothing was taken.
            InvalidTransitionError: ``owner`` is not held, or is a lease.
        """
        holding = self._holdings.get(owner)
        if holding is None or holding.is_lease:
            holding = self._active(owner)  # says what is wrong
        if num_tokens > holding.num_covered_tokens:
            self._allocator.grow(holding, self._layout.num_blocks_for(num_tokens))
            if self._history is not None:
                self._history.owned(holding.release_order, owner)
        return holding.num_covered_tokens

    def settle(self, owner: Owner, num_tokens: int) -> None:
        """The first ``num_tokens`` tokens of ``owner`` have settled: their steps are complete.

        Full blocks among them whose tokens are known can be hit from now on, unless another block
        of the same prefix can already, and what fell behind a window is released. Without windows,
        blocks of tokens that came after admission can be hit a few at a time, and all at the
        release: hardly anyone but the next turn looks for them. Fewer tokens than before change
        nothing.

        Raises:
            InvalidTransitionError: not held or not covered, or an operation may still write one of
                these tokens' blocks.
        """
        holding = self._held(owner)
        if num_tokens < holding.num_tokens_of_next_change:
            holding.num_settled_tokens = max(holding.num_settled_tokens, num_tokens)
            return
        if num_tokens > holding.num_covered_tokens:
            raise InvalidTransitionError(f"{owner} settles {num_tokens} tokens without blocks")
        if num_tokens < holding.num_settled_tokens:
            return
        if holding.num_writes:
            self._require_landed(holding, num_tokens)
        holding.num_settled_tokens = num_tokens
        if num_tokens >= holding.num_tokens_of_next_offer:
            self._offer(holding)
        if self._has_windows:
            self._prune(holding)
        self._note_next_change(holding)

    def release(self, owner: Owner) -> None:
        """``owner`` is gone at once; its blocks become allocatable when nothing touches them.

        Raises:
            DoubleReleaseError: ``owner`` is not held. Counted; no block was touched.
        """
        holding = self._holdings.pop(owner, None)
        if holding is None:
            self.stats.double_releases += 1
            raise DoubleReleaseError(f"{owner} is not held")
        self._offer(holding)
        self._let_go(holding, holding.release_order)

    def lease(self, owner: Owner) -> None:
        """Promise the blocks of ``owner`` to a reader: it will not grow or receive any more.

        Raises:
            InvalidTransitionError: not held, or leased already.
        """
        holding = self._active(owner)
        self._offer(holding)
        block_ids = holding.release_order
        self._pool.change(block_ids, _LEASE)
        self._zero_list.remove(block_ids)  # a reader must not see a block cleared under it
        holding.is_lease = True

    # Steps

    def dispatch_step(self, owners: Iterable[Owner]) -> StepSeq:
        """Number a non-empty step that may read or write the blocks of ``owners``.

        Raises:
            InvalidTransitionError: no owner, or one that is not held.
        """
        holdings = [self._held(owner) for owner in owners]
        if not holdings:
            raise InvalidTransitionError("an empty step has no number")
        for holding in holdings:
            if holding.received:
                holding.received.clear()  # what a step has been given, no read may fill
        return self._steps.dispatch(holdings)

    def complete_step(self, step: StepSeq) -> None:
        """Nothing of ``step`` will touch a block any more. Steps may complete in any order.

        Raises:
            DoubleReleaseError: it was retired before. Counted; nothing else was changed.
            InvalidTransitionError: it was never dispatched.
        """
        try:
            passed = self._steps.retire(step)
        except DoubleReleaseError:
            self.stats.double_releases += 1
            raise
        for block_ids in passed:
            self._pool.change(block_ids, _PASS_FENCE)

    def fail_step(self, step: StepSeq) -> None:
        """Retire a step that died. Call after a device drain: as ``complete_step``, but counted."""
        self.complete_step(step)
        self.stats.failed_steps += 1

    def take_zero_list(self) -> tuple[BlockId, ...]:
        """Return the blocks that the newest dispatched step must clear before its forward.

        They were allocated since the last call, still have their owner, and no operation writes
        them. Their owners count as part of that step: clearing is a device write, too.

        Raises:
            InvalidTransitionError: the newest step is not in flight, so none can clear them.
        """
        if not len(self._zero_list):
            return ()
        step = self._steps.last
        if not self._steps.is_in_flight(step):
            raise InvalidTransitionError("dispatch the step that clears the blocks first")
        block_ids, holdings = self._zero_list.take()
        for holding in holdings:
            self._steps.extend(step, holding)
        return block_ids

    # Resets

    def reset_cache(self) -> bool:
        """Empty the prefix tree: nothing computed up to now can be hit any more.

        Returns:
            True if nothing is left of what was computed up to now. False ("pending"): an owner
            still has blocks, or some are FENCED or QUARANTINED; nothing can be hit all the same.
        """
        self._allocator.forget_all()
        self._cache_epoch += 1
        self.stats.cache_resets += 1
        return not self._holdings and not self._pool.num_withheld

    def switch_fences(self, *, enabled: bool) -> None:
        """Turn step fences on or off, for a worker that changes its role.

        Raises:
            InvalidTransitionError: a step is in flight, so its blocks would lose their fence.
        """
        if self._steps.num_in_flight:
            raise InvalidTransitionError("fences can change only while no step is in flight")
        self._fences = enabled

    # Parts of the above

    def _new_holding(
        self, owner: Owner, tokens: TokenRun | None, num_cached_tokens: int
    ) -> Holding:
        num_hit_blocks, rest = divmod(num_cached_tokens, self._layout.block_size)
        if rest:
            raise InvalidTransitionError(
                f"{owner}: a hit of {num_cached_tokens} tokens is no multiple of "
                f"{self._layout.block_size}"
            )
        if tokens is not None and tokens.block_size != self._layout.block_size:
            raise InvalidTransitionError(
                f"{owner}: tokens in blocks of {tokens.block_size}, the pool's are of "
                f"{self._layout.block_size}"
            )
        size = self._layout.block_size
        tables = tuple([BlockTable(group, size) for group in self._layout.groups])
        holding = Holding(
            owner, tables, tokens, self._cache_epoch, num_cached_tokens, num_hit_blocks
        )
        holding.num_known_blocks = 0 if tokens is None else tokens.num_blocks
        holding.num_tokens_of_next_offer = num_cached_tokens + size
        return holding

    def _let_go(self, holding: Holding, block_ids: BlockIds) -> None:
        """Drop the holding's claim on ``block_ids``, in their order, behind the step fence."""
        self._zero_list.remove(block_ids)
        if self._fences and holding.steps_in_flight and len(block_ids):
            self._pool.change(block_ids, _END_LEASE_FENCED if holding.is_lease else _LET_GO_FENCED)
            self._steps.defer(block_ids, holding.steps_in_flight)
            self.stats.deferred_releases += 1
        else:
            self._pool.change(block_ids, _END_LEASE if holding.is_lease else _LET_GO)

    def _prune(self, holding: Holding) -> None:
        for table in holding.tables:
            pruned = table.prune(holding.num_settled_tokens)
            if len(pruned):
                self.stats.pruned_blocks += len(pruned)
                self._let_go(holding, pruned[::-1])

    def _offer(self, holding: Holding) -> None:
        """Let the prefix tree have all that has settled and is known, but not yet offered."""
        if holding.tokens is None or holding.cache_epoch != self._cache_epoch:
            return
        if not self._prefix_caching:
            return
        size = self._layout.block_size
        num_blocks = min(holding.num_settled_tokens // size, holding.tokens.num_blocks)
        self._allocator.offer(holding, num_blocks)
        is_output = num_blocks >= holding.num_known_blocks and not self._has_windows
        step = _OUTPUT_BLOCKS_PER_OFFER if is_output else 1
        holding.num_tokens_of_next_offer = (num_blocks + step) * size

    def _note_next_change(self, holding: Holding) -> None:
        change = holding.num_tokens_of_next_offer
        if self._has_windows:
            change = next_change(self._layout, holding.num_settled_tokens)
        if holding.num_writes:
            change = 0  # settling looks at what has landed
        holding.num_tokens_of_next_change = min(change, holding.num_covered_tokens + 1)

    def _require_landed(self, holding: Holding, num_tokens: int) -> None:
        """Raise if an operation may still write a block of the newly settled tokens."""
        size = self._layout.block_size
        newly = slice(holding.num_settled_tokens // size, -(-num_tokens // size))
        for table in holding.tables:
            block_ids = table.held_in(newly)
            if self._pool.holds(Hold.WRITE, block_ids).any():
                raise InvalidTransitionError(f"{holding.owner} settles tokens that may not be here")
