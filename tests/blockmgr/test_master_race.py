"""The race that fences exist for, played out in bytes for every order of events.

R ends at the output of step 1 while step 2, which writes R's next slot, is still on the device. N
is admitted and receives its KV by a read. If N got R's block, the late step writes over what the
read has brought. A second form: N ends while its read is under way, M gets the memory, and the
read lands in it.

The adversary runs the device write, the NIC write and every call in any order that causality
allows, and the receivers must find their own bytes each time. With a guard off it must find a
schedule that corrupts them, or it would prove nothing.
"""

from collections.abc import Callable, Iterator

import numpy as np
import pytest

from blockmgr.block_manager import BlockManager
from blockmgr.receive_target import ReceiveTarget
from core.ids import OperationId, Owner
from tests.blockmgr.words import admit_new, ids_of, layout_of, owner_of

BLOCK_NBYTES = 32
STALE, SENT, COMPUTED = 0xEE, 0x11, 0x22
READ = OperationId(1)


class Race:
    """One schedule: the pool's bytes, a slow device and a slow NIC."""

    def __init__(self, blocks: BlockManager, *, rewrites_block: bool, aborts: bool) -> None:
        self.blocks = blocks
        num_blocks = sum(blocks.counts().values())
        self.memory = np.zeros((num_blocks, BLOCK_NBYTES), dtype=np.uint8)
        self.rewrites_block = rewrites_block
        self.aborts = aborts
        self.done: list[str] = []
        self.ending = admit_new(blocks, "R", 33)
        self.written_block = ids_of(blocks, self.ending)[2]
        first = blocks.dispatch_step([self.ending])
        self.late_step = blocks.dispatch_step([self.ending])
        blocks.complete_step(first)
        self.receiver = admit_new(blocks, "N", 0)
        self.read_blocks: list[int] = []

    def actions(self) -> dict[str, Callable[[], None]]:
        """What the adversary may do next."""
        done = set(self.done)
        causes: dict[str, tuple[set[str], Callable[[], None]]] = {
            "s2 writes": (set(), self.run_late_step),
            "s2 output": ({"s2 writes"}, lambda: self.blocks.complete_step(self.late_step)),
            "free R": (set(), lambda: self.blocks.release(self.ending)),
            "N allocates": ({"free R"}, self.allocate_for_read),
            "NIC writes": ({"N allocates"}, self.land),
            "read terminal": ({"NIC writes"}, lambda: self.blocks.end_operation(READ)),
        }
        if self.aborts:
            causes["N aborts"] = ({"N allocates"}, lambda: self.blocks.release(self.receiver))
            # The device runs steps in order
            causes["M computes"] = ({"N aborts", "s2 writes"}, self.compute)
        return {
            name: action
            for name, (needed, action) in causes.items()
            if name not in done and needed <= done and self.fits(name)
        }

    def fits(self, name: str) -> bool:
        """Whether the pool can serve ``name`` now; a refusal must change nothing."""
        if name not in {"N allocates", "M computes"}:
            return True
        return self.blocks.num_allocatable >= 3

    def run_late_step(self) -> None:
        slots = slice(None) if self.rewrites_block else slice(2, 4)
        self.memory[self.written_block, slots] = STALE

    def allocate_for_read(self) -> None:
        (placed,) = self.blocks.begin_receive(self.receiver, [ReceiveTarget(0, 0, 3)], READ)
        self.read_blocks = [block_id for block_id, _ in placed]

    def land(self) -> None:
        self.memory[self.read_blocks] = SENT

    def compute(self) -> None:
        owner = admit_new(self.blocks, "M", 48)
        step = self.blocks.dispatch_step([owner])
        self.memory[ids_of(self.blocks, owner)] = COMPUTED
        self.blocks.complete_step(step)

    def is_intact(self) -> bool:
        """Whether every live receiver reads exactly the bytes that are its own."""
        expected: dict[Owner, int] = {self.receiver: SENT, owner_of("M"): COMPUTED}
        return all(
            bool((self.memory[ids_of(self.blocks, owner)] == byte).all())
            for owner, byte in expected.items()
            if self.blocks.holds(owner)
        )


def schedules(make: Callable[[], Race]) -> Iterator[Race]:
    """Play every schedule to its end."""
    prefixes: list[list[str]] = [[]]
    while prefixes:
        prefix = prefixes.pop()
        race = make()
        for name in prefix:
            race.actions()[name]()
            race.done.append(name)
        choices = list(race.actions())
        if not choices:
            yield race
        prefixes.extend([*prefix, name] for name in choices)


def play(
    kind: type[BlockManager],
    *,
    fences: bool,
    rewrites_block: bool,
    aborts: bool,
    num_blocks: int = 3,
) -> list[Race]:
    def make() -> Race:
        blocks = kind(layout_of(), num_blocks, fences=fences, prefix_caching=True)
        return Race(blocks, rewrites_block=rewrites_block, aborts=aborts)

    return list(schedules(make))


@pytest.mark.parametrize("num_blocks", [3, 5, 6])
@pytest.mark.parametrize("aborts", [False, True])
@pytest.mark.parametrize("rewrites_block", [False, True])
def test_b01_b02_a_receiver_reads_its_own_bytes_in_every_schedule(
    *, rewrites_block: bool, aborts: bool, num_blocks: int
) -> None:
    races = play(
        BlockManager,
        fences=True,
        rewrites_block=rewrites_block,
        aborts=aborts,
        num_blocks=num_blocks,
    )

    assert len(races) > 1
    for race in races:
        assert race.is_intact(), race.done
        assert len(race.done) == (8 if aborts else 6), f"stuck after {race.done}"
        race.blocks.check_invariants()
        assert race.blocks.num_withheld == 0


@pytest.mark.parametrize("rewrites_block", [False, True])
def test_b01_b02_the_adversary_wins_without_fences(*, rewrites_block: bool) -> None:
    races = play(BlockManager, fences=False, rewrites_block=rewrites_block, aborts=False)

    corrupted = [race.done for race in races if not race.is_intact()]

    assert ["free R", "N allocates", "NIC writes", "s2 writes"] in [
        [name for name in done if name not in {"s2 output", "read terminal"}] for done in corrupted
    ]


class CancelIsTerminal(BlockManager):
    """The guard switched off: what is released is no longer being read into."""

    def release(self, owner: Owner) -> None:
        for operation, pending in self._operations.items():
            if pending.holding.owner == owner:
                super().end_operation(operation)
        super().release(owner)

    def end_operation(self, operation: OperationId) -> None:
        if self._operations.get(operation) is not None:
            super().end_operation(operation)


def test_c21_the_adversary_wins_where_a_cancel_counts_as_terminal() -> None:
    races = play(CancelIsTerminal, fences=True, rewrites_block=False, aborts=True)

    assert any(not race.is_intact() for race in races)
