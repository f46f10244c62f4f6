"""Random lives of requests over a pool, host memory and storage, copies ending at any time."""

import random

from core.errors import OutOfBlocksError
from core.ids import Owner
from core.kv_layout import KVGroup
from tests.blockmgr.tier_world import SIZE, TierWorld
from tests.blockmgr.words import owner_of, run_of

LAYOUTS = (
    (KVGroup(layers=(0,)),),
    (KVGroup(layers=(0,)), KVGroup(layers=(1,), window=2 * SIZE)),
    (KVGroup(layers=(0,)), KVGroup(layers=(1,), window=SIZE + 1, num_sinks=2)),
)
NUM_BLOCKS = 20


class Lives:
    """Picks what happens next by small numbers, so that Hypothesis can choose and shrink them."""

    def __init__(self, layout: int, num_slots: int, max_copied: int, max_staged: int) -> None:
        self.world = TierWorld(
            NUM_BLOCKS,
            *LAYOUTS[layout],
            num_slots=num_slots,
            max_copied=max_copied,
            max_staged=min(max_staged, num_slots),
        )
        self._num_admitted = 0

    def admit(self, prefix: int, num_blocks: int) -> None:
        """Admit one that shares its first blocks with others of the same ``prefix``."""
        self._num_admitted += 1
        tokens = range(1000 * prefix, 1000 * prefix + num_blocks * SIZE + 1)
        try:
            self.world.admit(f"{self._num_admitted}", tokens)
        except OutOfBlocksError:
            assert not self.world.blocks.holds(owner_of(f"{self._num_admitted}"))

    def compute(self, pick: int) -> None:
        if able := self._able():
            self.world.compute(able[pick % len(able)][0])

    def lease(self, pick: int) -> None:
        if able := self._able():
            self.world.lease(able[pick % len(able)])

    def _able(self) -> list[Owner]:
        """Owners that are neither being loaded nor leased."""
        busy = self.world.loading | self.world.leased
        return [owner for owner in self.world.runs if owner not in busy]

    def finish(self, pick: int) -> None:
        if self.world.runs:
            self.world.finish(list(self.world.runs)[pick % len(self.world.runs)][0])

    def end(self, pick: int, *, failed: bool) -> None:
        if self.world.pending:
            self.world.perform(
                list(self.world.pending)[pick % len(self.world.pending)], failed=failed
            )
            self.world.take_loads()

    def fetch(self, prefix: int, num_blocks: int) -> None:
        run = run_of(range(1000 * prefix, 1000 * prefix + num_blocks * SIZE + 1), SIZE)
        self.world.tiers.fetch(owner_of(f"fetch-{prefix}"), run, num_blocks * SIZE)
        self.world.collect()

    def forget(self, prefix: int) -> None:
        self.world.tiers.forget(owner_of(f"fetch-{prefix}"))

    def lose(self, pick: int) -> None:
        """Somebody deletes an object."""
        if self.world.storage:
            names = list(self.world.storage)
            del self.world.storage[names[pick % len(names)]]

    def end_all(self) -> None:
        """When all has ended, every block and every slot is accounted for, and nothing waits."""
        for owner in list(self.world.runs):
            self.world.finish(owner[0])
        self.world.perform_all()
        self.world.take_loads()
        self.world.check()
        assert self.world.blocks.num_allocatable == NUM_BLOCKS
        assert self.world.book.host.num_pinned == 0
        assert self.world.book.num_staged_blocks == self.world.book.num_copied_blocks == 0
        assert self.world.blocks.stats.double_releases == 0
        assert self.world.book.stats.stale_answers == 0


def live(seed: int, num_events: int) -> None:
    """Let ``num_events`` random events happen, and all end."""
    random_source = random.Random(seed)
    choose = random_source.randrange
    lives = Lives(seed % len(LAYOUTS), 20 + choose(40), 5 + choose(24), choose(2) * 10)
    for _ in range(num_events):
        match choose(12):
            case 0 | 1 | 2:
                lives.admit(choose(12), choose(7))
            case 3 | 4:
                lives.compute(choose(12))
            case 5:
                lives.lease(choose(12))
            case 6 | 7:
                lives.finish(choose(12))
            case 8 | 9 | 10:
                lives.end(choose(12), failed=choose(8) == 0)
            case _:
                if choose(40) == 0:
                    lives.world.reset()
                lives.fetch(choose(12), 1 + choose(6))
        lives.forget(choose(12))
    lives.world.check()
    assert sum(lives.world.book.stats.loads.values()) > 20
    lives.end_all()
