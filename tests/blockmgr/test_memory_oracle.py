"""Every cell of the pool remembers who wrote it, in which life of its block.

The fuzz's oracle compares contents. Two owners with equal tokens write equal contents, so a late
writer could pass it by luck; it cannot pass this one.
"""

import random
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import pytest

from blockmgr.block_manager import BlockManager
from core.errors import InternalError
from core.ids import BlockId, Generation, OperationId, Owner
from tests.blockmgr.random_lives import run
from tests.blockmgr.unguarded import WithoutStepFence
from tests.blockmgr.world import BLOCK_SIZE, NUM_BLOCKS, Cell, Life, Step, World


class Stamp(NamedTuple):
    """Who wrote a cell, in which life of its block."""

    writer: Owner
    generation: Generation


class StampedWorld(World):
    """A world whose writes are stamped when they are dispatched, and land with their stamp."""

    def __init__(self, kind: type[BlockManager] = BlockManager) -> None:
        super().__init__(kind)
        self.stamps = np.full((NUM_BLOCKS, BLOCK_SIZE), None, dtype=object)
        self.pending: dict[int, tuple[list[Cell], list[Stamp]]] = {}
        """By identity of a list of cells to be written: the list, which so stays alive and keeps
        its identity, and who writes each cell."""

    def begin_receive(self, pick: int, count: int) -> None:
        before = set(self.reads)
        super().begin_receive(pick, count)
        self._stamp_reads_since(before)

    def join_receive(self, pick: int) -> None:
        before = set(self.reads)
        super().join_receive(pick)
        self._stamp_reads_since(before)

    def _stamp_reads_since(self, before: set[OperationId]) -> None:
        for operation in set(self.reads) - before:
            read = self.reads[operation]
            self._stamp(read.writes, read.life.owner)

    def _take_part(self, step: Step, life: Life, end: int) -> None:
        super()._take_part(step, life, end)
        self._stamp(step.writes, life.owner)

    def _write(self, cells: list[Cell]) -> None:
        super()._write(cells)
        _, stamps = self.pending.pop(id(cells), ([], []))
        for (block_id, slot, _), stamp in zip(cells, stamps, strict=False):
            self.stamps[block_id, slot] = stamp

    def _stamp(self, cells: list[Cell], owner: Owner) -> None:
        """Note ``owner`` as the writer of those of ``cells`` that have none yet."""
        _, stamps = self.pending.setdefault(id(cells), (cells, []))
        for block_id, _, _ in cells[len(stamps) :]:
            stamps.append(Stamp(owner, self.blocks.generation(BlockId(block_id))))

    def check(self, *, recount: bool = True) -> None:
        """Assert also that settled cells were written in the life that their block is in."""
        super().check(recount=recount)
        self.check_stamps()

    def check_stamps(self) -> None:
        """Assert only that."""
        for life in self.lives:
            for table in self.blocks.block_tables(life.owner):
                for position in range(life.settled):
                    block_id = int(table[position // BLOCK_SIZE])
                    if block_id >= 0:
                        stamp = self.stamps[block_id, position % BLOCK_SIZE]
                        now = self.blocks.generation(BlockId(block_id))
                        is_of_now = stamp is not None and stamp.generation == now
                        assert is_of_now, f"{life.owner} at {position} reads what {stamp} wrote"


class StampsOnly(StampedWorld):
    """Leaves everything else unnoticed."""

    def check(self, *, recount: bool = True) -> None:
        del recount
        self.check_stamps()


@pytest.mark.parametrize("seed", range(10))
def test_j02_every_reader_sees_only_writers_of_this_life_of_its_block(seed: int) -> None:
    run(StampedWorld(), random.Random(seed), num_events=300)


def complaints(kind: type[BlockManager]) -> Iterator[str]:
    """Yield what each of many worlds ends with, if it does not end well."""
    for seed in range(100):
        try:
            run(StampsOnly(kind), random.Random(seed), num_events=300)
        except (AssertionError, InternalError) as error:
            yield str(error)


def test_j02_a_writer_of_an_earlier_life_is_noticed() -> None:
    assert any("reads what Stamp" in complaint for complaint in complaints(WithoutStepFence))
