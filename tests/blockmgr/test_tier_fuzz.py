"""Random lives of requests over a pool, host memory and storage, copies ending at any time.

Every hit, from wherever, must be the content that its tokens say, computed since the last reset.
Copies and reads happen when they end, the latest moment that is allowed: a block or slot that is
given to another owner before shows as wrong content.
"""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.blockmgr.tier_lives import LAYOUTS, Lives, live

PICK = st.integers(0, 11)


class TierMachine(RuleBasedStateMachine):
    lives: Lives

    @initialize(
        layout=st.integers(0, len(LAYOUTS) - 1),
        num_slots=st.integers(1, 30),
        max_copied=st.integers(1, 24),
        max_staged=st.sampled_from([0, 2, 20]),
    )
    def start(self, layout: int, num_slots: int, max_copied: int, max_staged: int) -> None:
        self.lives = Lives(layout, num_slots, max_copied, max_staged)

    @rule(prefix=st.integers(0, 3), num_blocks=st.integers(0, 6))
    def admit(self, prefix: int, num_blocks: int) -> None:
        self.lives.admit(prefix, num_blocks)

    @rule(name=st.sampled_from(["compute", "lease", "finish", "lose"]), pick=PICK)
    def event(self, name: str, pick: int) -> None:
        getattr(self.lives, name)(pick)

    @rule(pick=PICK, failed=st.sampled_from([False, False, False, True]))
    def end(self, pick: int, *, failed: bool) -> None:
        self.lives.end(pick, failed=failed)

    @rule(prefix=st.integers(0, 3), num_blocks=st.integers(1, 6))
    def fetch(self, prefix: int, num_blocks: int) -> None:
        self.lives.fetch(prefix, num_blocks)

    @rule(prefix=st.integers(0, 3))
    def forget(self, prefix: int) -> None:
        self.lives.forget(prefix)

    @rule()
    def reset(self) -> None:
        self.lives.world.reset()

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "lives"):
            self.lives.world.check()

    def teardown(self) -> None:
        if hasattr(self, "lives"):
            self.lives.end_all()


TestTierMachine = pytest.mark.timeout(300)(TierMachine.TestCase)
TierMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)


@pytest.mark.parametrize("seed", range(6))
def test_long_lives_over_all_tiers(seed: int) -> None:
    live(seed, num_events=2000)
