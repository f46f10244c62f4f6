"""Random lives of requests against a byte oracle and a model of what may touch each block.

The device executes dispatched writes late, the NIC lands reads late, owners end at any time. Every
live owner must find its own bytes in all settled positions, and a block must be withheld exactly
while something that was under way at its release may still touch it: neither shorter, which is a
race, nor longer, which is a leak. ``World`` is the oracle.
"""

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from blockmgr.block_manager import BlockManager
from core.errors import InternalError
from tests.blockmgr.random_lives import run
from tests.blockmgr.unguarded import (
    CancelIsTerminal,
    ClearsReceived,
    FenceByFirstStep,
    FirstEndIsTerminal,
    PrunesTooFar,
    SharesUnsettled,
    WithoutStepFence,
)
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
