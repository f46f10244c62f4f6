"""Random lives of requests against a byte oracle and a model of what may touch each block.

The device executes dispatched writes late, the NIC lands reads late, owners end at any time. Every
live owner must find its own bytes in all settled positions, and a block must be withheld exactly
while something that was under way at its release may still touch it: neither shorter, which is a
race, nor longer, which is a leak. ``World`` is the oracle.
"""

import contextlib
import random
from collections.abc import Iterable, Sequence

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from blockmgr.block_manager import BlockManager
from blockmgr.free_queue import BlockIds
from blockmgr.holding import Holding
from blockmgr.receive_target import ReceiveTarget
from core.errors import DoubleReleaseError, InternalError
from core.ids import BlockId, Generation, OperationId, Owner, StepSeq
from tests.blockmgr.world import World

PICK = st.integers(0, 11)


class WorldMachine(RuleBasedStateMachine):
    """Lets Hypothesis find, and shrink, a sequence of events that breaks something."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World()

    @rule(pick=PICK, length=st.integers(1, 10), local=st.booleans())
    def admit(self, pick: int, length: int, *, local: bool) -> None:
        self.world.admit(pick, length, local=local)

    @rule(name=st.sampled_from(["execute", "reset_cache"]))
    def event(self, name: str) -> None:
        getattr(self.world, name)()

    @rule(
        name=st.sampled_from(["complete", "release", "preempt", "lease", "land", "join_receive"]),
        pick=PICK,
    )
    def event_of_one(self, name: str, pick: int) -> None:
        getattr(self.world, name)(pick)

    @rule(name=st.sampled_from(["end_read", "fail_read", "begin_copy", "end_copy"]), pick=PICK)
    def end_or_copy(self, name: str, pick: int) -> None:
        getattr(self.world, name)(pick)

    @rule(picks=st.integers(1, 255))
    def dispatch(self, picks: int) -> None:
        self.world.dispatch(picks)

    @rule(pick=PICK, count=st.integers(1, 5))
    def begin_receive(self, pick: int, count: int) -> None:
        self.world.begin_receive(pick, count)

    @invariant()
    def holds(self) -> None:
        self.world.check()

    def teardown(self) -> None:
        self.world.finish()


TestWorld = WorldMachine.TestCase
TestWorld.settings = settings(
    max_examples=40, stateful_step_count=50, deadline=None, derandomize=True
)


def run(world: World, rng: random.Random, num_events: int, *, recount_every: int = 1) -> None:
    """Let ``num_events`` random events happen, with the proportions of a busy worker."""
    events = {
        lambda: world.admit(rng.randrange(20), rng.randint(1, 10), local=rng.random() < 0.6): 5,
        lambda: world.dispatch(rng.getrandbits(24)): 8,
        world.execute: 8,
        lambda: world.complete(rng.randrange(3)): 8,
        lambda: world.release(rng.randrange(12)): 1.5,
        lambda: world.preempt(rng.randrange(12)): 0.5,
        lambda: world.fail_read(rng.randrange(12)): 0.5,
        lambda: world.begin_receive(rng.randrange(12), rng.randint(1, 5)): 4,
        lambda: world.join_receive(rng.randrange(12)): 3,
        lambda: world.land(rng.randrange(12)): 4,
        lambda: world.end_read(rng.randrange(12)): 4,
        lambda: world.begin_copy(rng.randrange(12)): 1,
        lambda: world.end_copy(rng.randrange(12)): 2,
        lambda: world.lease(rng.randrange(12)): 0.4,
        world.reset_cache: 0.1,
    }
    chosen = rng.choices(list(events), weights=list(events.values()), k=num_events)
    for number, event in enumerate(chosen):
        event()
        world.check(recount=number % recount_every == 0)
    world.finish()


def run_seeds(kind: type[BlockManager], seeds: range) -> list[World]:
    worlds = [World(kind) for _ in seeds]
    for seed, world in zip(seeds, worlds, strict=True):
        run(world, random.Random(seed), num_events=300)
    return worlds


def test_j01_random_lives_keep_every_promise() -> None:
    counters = [world.blocks.stats for world in run_seeds(BlockManager, range(20))]

    # The events must have reached what they are to test
    for name in ("evictions", "hit_tokens", "pruned_blocks", "deferred_releases"):
        assert sum(getattr(stats, name) for stats in counters) > 50, name


# The guards switched off: the fuzz must notice each


class WithoutStepFence(BlockManager):
    """Released blocks are reused while a step is in flight."""

    def _let_go(self, holding: Holding, block_ids: BlockIds) -> None:
        self._fences = False
        super()._let_go(holding, block_ids)


class FenceByFirstStep(BlockManager):
    """The first completed step of a request counts for all of its steps."""

    def _let_go(self, holding: Holding, block_ids: BlockIds) -> None:
        steps, holding.steps_in_flight = holding.steps_in_flight, holding.steps_in_flight[:1]
        super()._let_go(holding, block_ids)
        holding.steps_in_flight = steps


class CancelIsTerminal(BlockManager):
    """A released owner's reads count as over."""

    def release(self, owner: Owner) -> None:
        for operation, pending in self._operations.items():
            if pending.holding.owner == owner:
                super().end_operation(operation)
        super().release(owner)

    def end_operation(self, operation: OperationId) -> None:
        if self._operations.get(operation) is not None:
            super().end_operation(operation)


class ClearsReceived(BlockManager):
    """Blocks that a read fills are cleared like all others."""

    def begin_receive(
        self, owner: Owner, targets: Sequence[ReceiveTarget], operation: OperationId
    ) -> list[list[tuple[BlockId, Generation]]]:
        placed = super().begin_receive(owner, targets, operation)
        for part in placed:
            received = np.array([at for at, _ in part], dtype=np.int32)
            self._zero_list.add(received, self._holdings[owner])
        return placed

    def check_invariants(self) -> None:
        """Leave it to the bytes to show the damage."""


class PrunesTooFar(BlockManager):
    """Tokens in flight count as settled where the window is pruned."""

    def settle(self, owner: Owner, num_tokens: int) -> None:
        super().settle(owner, num_tokens)
        holding = self._held(owner)
        for table in holding.tables:
            pruned = table.prune(num_tokens + 2)
            if len(pruned):
                self._let_go(holding, pruned)


class SharesUnsettled(BlockManager):
    """Blocks can be hit before the step that writes them has completed."""

    def dispatch_step(self, owners: Iterable[Owner]) -> StepSeq:
        owners = list(owners)
        for owner in owners:
            holding = self._held(owner)
            known = 0 if holding.tokens is None else holding.tokens.num_blocks
            self._allocator.offer(holding, min(known, holding.num_covered_blocks))
        return super().dispatch_step(owners)


class FirstEndIsTerminal(BlockManager):
    """A block that two reads fill is free of both when one has ended."""

    def _join_receive(self, holding: Holding, block_ids: BlockIds, *, num_new: int) -> None:
        """Count no second read."""

    def end_operation(self, operation: OperationId) -> None:
        with contextlib.suppress(DoubleReleaseError):
            super().end_operation(operation)

    def check_invariants(self) -> None:
        """Leave it to the states and bytes to show the damage."""


@pytest.mark.parametrize(
    "kind",
    [
        FirstEndIsTerminal,
        WithoutStepFence,
        FenceByFirstStep,
        CancelIsTerminal,
        ClearsReceived,
        PrunesTooFar,
        SharesUnsettled,
    ],
)
def test_j03_each_guard_that_is_off_is_noticed(kind: type[BlockManager]) -> None:
    with pytest.raises((AssertionError, InternalError)):
        run_seeds(kind, range(20))
