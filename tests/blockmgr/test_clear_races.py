"""Clearing of new blocks against reads that land in them, in every order, in bytes.

R has three blocks: a read fills two of them, a step computes into the third, which is cleared
first. The kernel that clears is slow. Whatever the order, R finds what the read brought and what
the step computed; and S, who gets R's memory, finds its own.
"""

from collections.abc import Callable

import numpy as np
import pytest

from blockmgr.block_manager import BlockManager
from blockmgr.receive_target import ReceiveTarget
from core.ids import BlockId, OperationId, StepSeq
from tests.blockmgr.unguarded import ClearsReceived
from tests.blockmgr.words import admit_new, ids_of, layout_of
from tests.interleaving import every_schedule

SENT, COMPUTED, OTHER = 0x11, 0x22, 0x33
LOAD = OperationId(1)


class ClearRace:
    """One schedule. Steps run on the device in order; a read runs beside them."""

    def __init__(self, kind: type[BlockManager], *, ends: bool) -> None:
        self.blocks = kind(layout_of(), 3, fences=True, prefix_caching=False, zero_on_allocate=True)
        self.memory = np.full((3, 4), 0xEE, dtype=np.uint8)
        self.done: list[str] = []
        self.ends = ends
        self.owner = admit_new(self.blocks, "R", 0)
        (placed,) = self.blocks.begin_receive(self.owner, [ReceiveTarget(0, 0, 2)], LOAD)
        self.loaded = [block_id for block_id, _ in placed]
        self.blocks.grow(self.owner, 48)
        self.computed = ids_of(self.blocks, self.owner)[2]
        self.step = StepSeq(0)
        self.zero_list: tuple[BlockId, ...] = ()

    def actions(self) -> dict[str, Callable[[], None]]:
        """What may happen next."""
        causes: dict[str, tuple[set[str], Callable[[], None]]] = {
            "dispatch": (set(), self.dispatch),
            "kernels run": ({"dispatch"}, self.run),
            "step output": ({"kernels run"}, lambda: self.blocks.complete_step(self.step)),
            "load lands": (set(), self.land),
            "load terminal": ({"load lands"}, lambda: self.blocks.end_operation(LOAD)),
        }
        if self.ends:
            causes["R ends"] = (set(), lambda: self.blocks.release(self.owner))
            causes["S computes"] = ({"R ends"}, self.compute_other)
        done = set(self.done)
        return {
            name: action
            for name, (needed, action) in causes.items()
            if name not in done and needed <= done and self.is_possible(name)
        }

    def is_possible(self, name: str) -> bool:
        if name == "dispatch":
            return self.blocks.holds(self.owner)
        # The device runs steps in order: S's step is behind R's.
        is_behind = "dispatch" not in self.done or "kernels run" in self.done
        return name != "S computes" or (self.blocks.num_allocatable == 3 and is_behind)

    def dispatch(self) -> None:
        self.step = self.blocks.dispatch_step([self.owner])
        self.zero_list = self.blocks.take_zero_list()

    def run(self) -> None:
        self.memory[list(self.zero_list)] = 0
        self.memory[self.computed] = COMPUTED

    def land(self) -> None:
        self.memory[self.loaded] = SENT

    def compute_other(self) -> None:
        other = admit_new(self.blocks, "S", 48)
        step = self.blocks.dispatch_step([other])
        self.memory[list(self.blocks.take_zero_list())] = 0
        self.memory[ids_of(self.blocks, other)] = OTHER
        self.blocks.complete_step(step)

    def is_intact(self) -> bool:
        """Whether whoever is live finds its own bytes."""
        if "S computes" in self.done:
            return bool((self.memory == OTHER).all())
        if not self.blocks.holds(self.owner):
            return True
        is_loaded = (self.memory[self.loaded] == SENT).all()
        return bool(is_loaded and (self.memory[self.computed] == COMPUTED).all())


@pytest.mark.parametrize("ends", [False, True])
def test_b05_clearing_never_meets_what_a_load_brings_in_any_order(*, ends: bool) -> None:
    races = list(every_schedule(lambda: ClearRace(BlockManager, ends=ends)))

    assert len(races) > 5
    for race in races:
        assert race.is_intact(), race.done
        assert "dispatch" not in race.done or race.zero_list == (race.computed,), race.done
        if ends:
            assert "S computes" in race.done, f"stuck after {race.done}"
        race.blocks.check_invariants()


def test_b05_the_adversary_wins_where_received_blocks_are_cleared_too() -> None:
    races = list(every_schedule(lambda: ClearRace(ClearsReceived, ends=False)))

    assert any(not race.is_intact() for race in races)


class WithoutStepFence(BlockManager):
    """The guard switched off: a block that a step will still clear is free at once."""

    def release(self, owner: tuple[str, int]) -> None:  # type: ignore[override]
        self._fences = False
        super().release(owner)  # type: ignore[arg-type]


def test_b05_the_adversary_wins_where_the_clearing_step_is_no_fence() -> None:
    class Late(ClearRace):
        """The device runs R's kernels last, as another stream could."""

        def is_possible(self, name: str) -> bool:
            if name == "dispatch":
                return self.blocks.holds(self.owner)
            return name != "S computes" or self.blocks.num_allocatable == 3

    kept = list(every_schedule(lambda: Late(BlockManager, ends=True)))
    lost = list(every_schedule(lambda: Late(WithoutStepFence, ends=True)))

    assert all(race.is_intact() for race in kept)
    assert any(not race.is_intact() for race in lost)
