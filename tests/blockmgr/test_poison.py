"""Poison must name the stale writer, and must never accuse a rightful one.

The failure guarded against: a step or a read that goes on after its blocks were handed back, and
writes into the next owner's KV: wrong tokens, no error. And poison that is written too early, so
that it destroys what a copy still reads, or takes a read's own bytes for a stale write.
"""

from dataclasses import dataclass

import numpy as np
import pytest

from blockmgr.block_manager import BlockManager
from blockmgr.history import BlockHistory
from blockmgr.poison import Poison
from blockmgr.receive_target import ReceiveTarget
from blockmgr.states import BlockState
from core.errors import MemoryCorruptionError
from core.ids import BlockId, OperationId, Owner
from tests.blockmgr.words import layout_of, owner_of, run_of

NUM_BLOCKS = 6
NUM_WORDS = 8


class Memory:
    """Bytes of a pool, as a device and a NIC see them."""

    num_blocks = NUM_BLOCKS

    def __init__(self) -> None:
        self.words = np.zeros((NUM_BLOCKS, NUM_WORDS), dtype=np.int32)

    def fill_words(self, block_ids: np.ndarray, words: np.ndarray) -> None:
        self.words[block_ids] = words[:, None]

    def find_other_word(self, block_ids: np.ndarray, words: np.ndarray) -> tuple[int, int] | None:
        found = np.argwhere(self.words[block_ids] != words[:, None])
        return None if not len(found) else (int(found[0][0]), int(found[0][1]) * 4)

    def write(self, block_ids: list[int], value: int = 7) -> None:
        """A step or a NIC writes."""
        self.words[block_ids] = value


@dataclass
class Poisoned:
    blocks: BlockManager
    memory: Memory
    poison: Poison

    def admit(self, name: str, num_blocks: int) -> tuple[Owner, list[int]]:
        owner = owner_of(name)
        self.blocks.admit(owner, tokens=None, num_cached_tokens=0, num_tokens=16 * num_blocks)
        return owner, self.blocks.block_tables(owner)[0].tolist()

    def receive(self, name: str, count: int, operation: int) -> tuple[Owner, list[int]]:
        owner = owner_of(name)
        self.blocks.admit(owner, tokens=None, num_cached_tokens=0, num_tokens=0)
        (placed,) = self.blocks.begin_receive(
            owner, [ReceiveTarget(0, 0, count)], OperationId(operation)
        )
        return owner, [block_id for block_id, _ in placed]


def make_poisoned(*, seed: int = 1, fences: bool = True) -> Poisoned:
    memory, history = Memory(), BlockHistory(NUM_BLOCKS)
    poison = Poison(NUM_BLOCKS, memory, history, seed=seed)
    blocks = BlockManager(
        layout_of(),
        NUM_BLOCKS,
        fences=fences,
        prefix_caching=True,
        observers=(poison,),
        history=history,
    )
    return Poisoned(blocks, memory, poison)


@pytest.fixture
def poisoned() -> Poisoned:
    return make_poisoned()


def test_i08_a_block_written_while_free_is_caught_with_all_that_is_known(
    poisoned: Poisoned,
) -> None:
    owner, (first, *_) = poisoned.receive("A", 3, operation=41)
    poisoned.blocks.end_operation(OperationId(41))
    poisoned.blocks.release(owner)

    poisoned.memory.words[first, 5] ^= 1  # a bit of a write that comes after the end

    with pytest.raises(MemoryCorruptionError) as caught:
        poisoned.admit("B", NUM_BLOCKS)
    for part in (f"block={first}", "generation=1", "offset=20", "A", "last_operation=41"):
        assert part in str(caught.value)
    assert "B" not in str(caught.value).split("last_owner")[1]
    assert "\n" not in str(caught.value)


def test_i08_a_block_written_before_its_first_allocation_is_caught(poisoned: Poisoned) -> None:
    poisoned.memory.write([4])
    with pytest.raises(MemoryCorruptionError, match="block=4 generation=0 at offset=0"):
        poisoned.admit("A", NUM_BLOCKS)


def test_i08_growth_by_one_block_verifies_it(poisoned: Poisoned) -> None:
    owner, _ = poisoned.admit("A", 1)
    poisoned.memory.write([1])
    with pytest.raises(MemoryCorruptionError, match="block=1"):
        poisoned.blocks.grow(owner, 32)


def test_i08_a_read_and_its_steps_write_as_they_should(poisoned: Poisoned) -> None:
    for number in range(1, 12):
        owner, block_ids = poisoned.receive(f"R{number}", 4, operation=number)
        poisoned.memory.write(block_ids)  # lands
        poisoned.blocks.end_operation(OperationId(number))
        step = poisoned.blocks.dispatch_step([owner])
        poisoned.blocks.release(owner)
        assert set(map(poisoned.blocks.state, block_ids)) == {BlockState.FENCED}
        poisoned.memory.write(block_ids, value=9)  # the step runs late
        poisoned.blocks.complete_step(step)
    assert poisoned.poison.num_verified == 44


def test_j03_without_step_fences_the_late_step_is_caught() -> None:
    poisoned = make_poisoned(fences=False)
    owner, block_ids = poisoned.admit("A", 3)
    poisoned.blocks.dispatch_step([owner])
    poisoned.blocks.release(owner)
    poisoned.memory.write(block_ids)  # the step runs late
    with pytest.raises(MemoryCorruptionError, match=r"last_owner=.*A"):
        poisoned.admit("B", NUM_BLOCKS)


def test_i08_quarantined_blocks_are_left_alone_until_their_operation_ends(
    poisoned: Poisoned,
) -> None:
    owner, block_ids = poisoned.receive("A", 3, operation=5)
    poisoned.memory.write(block_ids)
    poisoned.blocks.release(owner)
    # A copy may still read them, a read may still write them
    assert (poisoned.memory.words[block_ids] == 7).all()
    poisoned.memory.write(block_ids, value=8)
    assert (poisoned.memory.words[block_ids] == 8).all()
    poisoned.blocks.end_operation(OperationId(5))
    assert not (poisoned.memory.words[block_ids] == 8).any()
    poisoned.admit("B", NUM_BLOCKS)


def test_j03_an_operation_ended_without_proof_is_caught(poisoned: Poisoned) -> None:
    """A cancel returned, the write lands later: the next owner is told instead of harmed."""
    owner, block_ids = poisoned.receive("A", 3, operation=6)
    poisoned.blocks.release(owner)
    poisoned.blocks.end_operation(OperationId(6))  # taken for terminal
    poisoned.memory.write(block_ids)
    with pytest.raises(MemoryCorruptionError, match="last_operation=6"):
        poisoned.receive("B", NUM_BLOCKS, operation=7)


def test_i08_what_is_cached_keeps_its_bytes_and_is_poisoned_when_evicted(
    poisoned: Poisoned,
) -> None:
    owner = owner_of("A")
    tokens = run_of(list(range(32)))
    poisoned.blocks.admit(owner, tokens=tokens, num_cached_tokens=0, num_tokens=32)
    block_ids = poisoned.blocks.block_tables(owner)[0].tolist()
    poisoned.memory.write(block_ids)
    poisoned.blocks.settle(owner, 32)
    poisoned.blocks.release(owner)
    assert (poisoned.memory.words[block_ids] == 7).all()
    # A hit takes them as they are, evicting verifies nothing that was rightfully written
    poisoned.blocks.admit(owner_of("B"), tokens=tokens, num_cached_tokens=32, num_tokens=32)
    poisoned.blocks.release(owner_of("B"))
    poisoned.admit("C", NUM_BLOCKS)
    assert not (poisoned.memory.words[block_ids] == 7).any()
    poisoned.blocks.check_invariants()


def test_i08_patterns_differ_by_block_generation_and_pool() -> None:
    """What is copied from another block, an older life or another pool is no match."""
    one, other = make_poisoned(seed=1), make_poisoned(seed=2)
    seen = {tuple(row) for pool in (one, other) for row in pool.memory.words.tolist()}
    for number in range(50):
        owner, _ = one.admit(f"R{number}", NUM_BLOCKS)
        one.blocks.release(owner)
        seen |= {tuple(row) for row in one.memory.words.tolist()}
    assert len(seen) == 2 * NUM_BLOCKS + 50 * NUM_BLOCKS
    assert all(0x20 <= byte < 0x40 for byte in one.memory.words.tobytes())


def test_generations_are_the_pools_own(poisoned: Poisoned) -> None:
    for number in range(3):
        owner, block_ids = poisoned.admit(f"R{number}", number + 2)
        poisoned.blocks.release(owner)
        for block_id in block_ids:
            generation = poisoned.blocks.generation(BlockId(block_id))
            assert poisoned.poison._generations[block_id] == generation
