"""Eviction where public trees lose blocks: resets midway, equal prefixes, windows, exposed parents.

The cache is compared with a model of what must be found after every use and every eviction.
"""

import random
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from blockmgr.block_manager import BlockManager
from blockmgr.free_queue import BlockIds
from blockmgr.leaf_order import LeafOrder
from blockmgr.receive_target import ReceiveTarget
from blockmgr.states import BlockState
from blockmgr.token_run import TokenRun
from core.errors import DoubleReleaseError
from core.ids import BlockId, OperationId, Owner
from core.kv_layout import KVGroup
from tests.blockmgr.conftest import MakeManager
from tests.blockmgr.words import admit_new, ids_of, num_free, owner_of, run_of

SIZE = 4


class Evictions:
    """Writes down which blocks were evicted, batch by batch."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []

    def moved(self, block_ids: BlockIds, old: BlockState, new: BlockState) -> None:
        if (old, new) == (BlockState.CACHED, BlockState.FREE):
            self.batches.append(block_ids.tolist())


class Tree:
    """A manager whose cached prefixes are written as strings, one letter a block."""

    def __init__(self, make_manager: MakeManager, num_blocks: int, **options: object) -> None:
        self.evictions = Evictions()
        self.blocks = make_manager(
            num_blocks, block_size=SIZE, observers=[self.evictions], **options
        )
        self._names = iter(range(10**9))

    def run(self, prefix: str) -> TokenRun:
        return run_of((ord(letter) for letter in prefix for _ in range(SIZE)), SIZE)

    def use(self, prefix: str) -> Owner:
        """Admit a request that computes ``prefix``, and settle it."""
        owner, run = owner_of(f"R{next(self._names)}"), self.run(prefix)
        cached = self.blocks.count_cached_tokens(run)
        self.blocks.admit(owner, tokens=run, num_cached_tokens=cached, num_tokens=len(run))
        self.blocks.settle(owner, len(run))
        return owner

    def keep(self, *prefixes: str) -> None:
        """Leave ``prefixes`` cached, in the order of their last use."""
        for prefix in prefixes:
            self.blocks.release(self.use(prefix))

    def block(self, prefix: str) -> int:
        """Return the block of the last letter of a cached prefix."""
        hit = self.blocks._tree.find(self.run(prefix), len(prefix))
        assert hit is not None
        return int(hit.runs[0][-1][1][-1])

    def has(self, prefix: str) -> bool:
        return self.blocks.count_cached_tokens(self.run(prefix)) == len(prefix) * SIZE

    def take(self, count: int) -> Owner:
        """Allocate ``count`` blocks."""
        return admit_new(self.blocks, f"T{next(self._names)}", count * SIZE)


def test_e09_one_bad_id_does_not_discard_the_rest(make_manager: MakeManager) -> None:
    tree = Tree(make_manager, 3)
    tree.keep("A", "B")

    with pytest.raises(DoubleReleaseError, match=r"blocks \[2\]"):
        tree.blocks._allocator._recycle(np.array([0, 2, 1]))

    assert num_free(tree.blocks) == 3
    tree.blocks._tree.forget_all()


def test_e17_a_long_run_loses_only_its_end(make_manager: MakeManager) -> None:
    tree = Tree(make_manager, 6)
    tree.keep("ABCDEF")

    tree.take(1)

    assert tree.has("ABCDE")
    assert not tree.has("ABCDEF")


class ResetsWhileRecycling(Evictions):
    """Resets the cache when the first evicted block is on its way."""

    blocks: BlockManager | None = None

    def moved(self, block_ids: BlockIds, old: BlockState, new: BlockState) -> None:
        super().moved(block_ids, old, new)
        if self.blocks is not None and len(self.batches) == 1:
            blocks, self.blocks = self.blocks, None
            blocks.reset_cache()


def test_e18_a_reset_while_blocks_are_recycled_neither_loses_nor_doubles_one(
    make_manager: MakeManager,
) -> None:
    tree = Tree(make_manager, 6)
    tree.keep("AB", "CD", "EF")
    resets = ResetsWhileRecycling()
    resets.blocks = tree.blocks
    tree.blocks._pool.observers = [resets]

    tree.blocks.release(tree.take(2))

    assert num_free(tree.blocks) == 6
    assert not any(tree.has(prefix) for prefix in ("A", "C", "E"))


# What public trees do not meet: equal prefixes computed at one time


def test_a_prefix_in_front_of_one_in_use_can_be_given_up(make_manager: MakeManager) -> None:
    # Given two requests that compute the same two blocks; the second goes on behind the first's
    tree = Tree(make_manager, 6)
    first, second = owner_of("first"), owner_of("second")
    for owner, prefix in ((first, "AB"), (second, "ABC")):
        run = tree.run(prefix)
        tree.blocks.admit(owner, tokens=run, num_cached_tokens=0, num_tokens=len(run))
    tree.blocks.settle(first, 2 * SIZE)
    tree.blocks.settle(second, 3 * SIZE)
    tree.blocks.release(first)
    assert tree.blocks.counts()[BlockState.CACHED] == 2

    # When all that can be had is needed, then the kept copy goes although C follows it
    tree.take(3)
    assert not tree.has("A")

    # And what the second offers from now on is found again, from the start
    assert tree.blocks.counts()[BlockState.ACTIVE] == 6
    second_blocks = ids_of(tree.blocks, second)
    tree.blocks.settle(second, 3 * SIZE)
    tree.blocks.release(second)
    assert {tree.blocks.state(BlockId(at)) for at in second_blocks} <= {
        BlockState.FREE,
        BlockState.CACHED,
    }


def test_the_oldest_leaf_goes_first_whatever_it_was_exposed_by(make_manager: MakeManager) -> None:
    # Given an old prefix with a child, and a younger prefix
    tree = Tree(make_manager, 4)
    tree.keep("A", "AB", "C")
    order = [tree.block("AB"), tree.block("A"), tree.block("C")]
    tree.take(1)

    for _ in range(3):
        tree.take(1) if tree.blocks.num_allocatable else None

    assert [at for batch in tree.evictions.batches for at in batch] == order


def test_blocks_behind_a_window_go_before_the_prefix_that_can_still_be_hit(
    make_manager: MakeManager,
) -> None:
    # Given six blocks in a group without and in one with a window of a block
    blocks = make_manager(
        12, KVGroup(layers=(0,)), KVGroup(layers=(1,), window=SIZE), block_size=SIZE
    )
    owner = owner_of("R")
    run = run_of(range(6 * SIZE), SIZE)
    blocks.admit(owner, tokens=run, num_cached_tokens=0, num_tokens=6 * SIZE)
    blocks.settle(owner, 6 * SIZE)
    blocks.release(owner)
    filler = admit_new(blocks, "F", 0)

    blocks.begin_receive(filler, [ReceiveTarget(0, 0, 5)], OperationId(1))

    assert blocks.count_cached_tokens(run) == 6 * SIZE
    blocks.end_operation(OperationId(1))


def test_sinks_stay_as_long_as_the_prefix_that_needs_them(make_manager: MakeManager) -> None:
    # Given eight blocks in a group without and in one with a window of a block and a block of sinks
    blocks = make_manager(
        16, KVGroup(layers=(0,)), KVGroup(layers=(1,), window=SIZE, num_sinks=SIZE), block_size=SIZE
    )
    owner, run = owner_of("R"), run_of(range(8 * SIZE), SIZE)
    blocks.admit(owner, tokens=run, num_cached_tokens=0, num_tokens=8 * SIZE)
    blocks.settle(owner, 8 * SIZE)
    blocks.release(owner)
    spare = blocks.num_allocatable - 8 - 2  # but for the full group, the sinks and the window

    # When everything that no hit needs is evicted
    filler = admit_new(blocks, "F", 0)
    blocks.begin_receive(filler, [ReceiveTarget(0, 0, spare)], OperationId(1))

    # Then the whole prefix can still be hit
    assert blocks.count_cached_tokens(run) == 8 * SIZE
    blocks.end_operation(OperationId(1))


def test_thousands_of_tenants_each_have_a_tree_that_goes_with_its_last_block(
    make_manager: MakeManager,
) -> None:
    blocks = make_manager(3_000, block_size=1)
    for tenant in range(3_000):
        owner = owner_of(f"R{tenant}")
        tokens = run_of([7], 1, salt=f"tenant-{tenant}")
        blocks.admit(owner, tokens=tokens, num_cached_tokens=0, num_tokens=1)
        blocks.settle(owner, 1)
        blocks.release(owner)

    admit_new(blocks, "half", 1_500)

    assert blocks.count_cached_tokens(run_of([7], 1, salt="tenant-1499")) == 0
    assert blocks.count_cached_tokens(run_of([7], 1, salt="tenant-1500")) == 1
    assert len(blocks._tree._nodes._roots) == 1_500


# Against a model: every sequence of uses and evictions


def letters(rng: random.Random) -> str:
    return "".join(rng.choice("AB") for _ in range(rng.randint(1, 7)))


def run_against_model(tree: Tree, rng: random.Random, num_events: int) -> Iterator[str]:
    """Let requests come and go at random; the cache must have just what was not evicted."""
    kept: dict[str, int] = {}
    users: list[tuple[Owner, str]] = []
    for _ in range(num_events):
        if users and rng.random() < 0.5:
            owner, prefix = users.pop(rng.randrange(len(users)))
            tree.blocks.release(owner)
        elif tree.blocks.num_allocatable >= 8:
            prefix = letters(rng)
            users.append((tree.use(prefix), prefix))
            for end in range(1, len(prefix) + 1):
                kept.setdefault(prefix[:end], tree.block(prefix[:end]))
        evicted = {at for batch in tree.evictions.batches for at in batch}
        tree.evictions.batches.clear()
        for prefix in [prefix for prefix, at in kept.items() if at in evicted]:
            if not tree.has(prefix):
                kept.pop(prefix)
        for prefix, at in kept.items():
            assert tree.has(prefix), prefix
            assert tree.block(prefix) == at
        tree.blocks.check_invariants()
        yield from kept


@pytest.mark.parametrize("seed", range(8))
def test_e07_every_unused_leaf_is_in_the_order_and_every_kept_prefix_is_found(
    make_manager: MakeManager, seed: int
) -> None:
    tree = Tree(make_manager, 24)
    seen = set(run_against_model(tree, random.Random(seed), 200))

    assert len(seen) > 60
    assert tree.blocks.stats.evictions > 20


# The order by itself


def drain(order: LeafOrder, count: int) -> list[int]:
    nodes = order.oldest(count)
    order.remove_all(nodes)
    return nodes.tolist()


def used(order: LeafOrder, nodes: Sequence[int], start: int) -> None:
    for time, node in enumerate(nodes, start):
        order.set_time(node, time)
        order.add(node)


def test_leaves_come_in_the_order_of_their_last_use() -> None:
    order = LeafOrder(4)
    used(order, [5, 3, 900, 7], start=1)
    used(order, [3], start=10)
    order.remove(7)

    assert drain(order, 2) == [5, 900]
    assert drain(order, 5) == [3]
    order.check_invariants()


def test_an_exposed_parent_takes_the_place_of_its_time() -> None:
    order = LeafOrder(4)
    for time, node in enumerate((10, 11, 12), start=1):
        order.set_time(node, time * 10)
    used(order, [1, 2, 3], start=14)
    order.expose(11)
    order.expose(10)
    order.expose(12)

    assert drain(order, 4) == [10, 1, 2, 3]
    assert drain(order, 4) == [11, 12]
    order.check_invariants()


def test_the_order_of_leaves_stays_small_however_often_they_are_used() -> None:
    order = LeafOrder(8)
    for start in range(1, 10_000, 3):
        used(order, [0, 1, 2], start)
    order.check_invariants()
    assert drain(order, 3) == [0, 1, 2]
