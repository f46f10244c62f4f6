"""Which cached blocks go first, and that none is lost or taken twice on the way.

Seen in other systems: a heap that forgets the nodes it skipped, so that memory leaks until a
restart; a parent that is pushed once per child and freed twice; a failure between detaching and
recycling. Seen from outside: a pool, prompts, and the batches in which blocks become FREE.
"""

import random
from collections.abc import Iterator
from typing import Any

import pytest

from blockmgr.block_manager import BlockManager
from blockmgr.free_queue import BlockIds
from blockmgr.prefix_eviction import PrefixEviction
from blockmgr.states import BlockState
from core.errors import DoubleReleaseError, OutOfBlocksError
from core.ids import BlockId
from tests.blockmgr.words import admit_new, ids_of, layout_of, owner_of, run_of

SIZE = 4


class Evictions:
    """The batches in which CACHED blocks became FREE."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []

    def moved(self, block_ids: BlockIds, old: BlockState, new: BlockState) -> None:
        if (old, new) == (BlockState.CACHED, BlockState.FREE):
            self.batches.append(block_ids.tolist())

    @property
    def block_ids(self) -> list[int]:
        """All of them, in order."""
        return [block_id for batch in self.batches for block_id in batch]


class Cache:
    """A pool of small blocks, and prompts that are words of letters, one letter per block."""

    def __init__(self, num_blocks: int) -> None:
        self.evictions = Evictions()
        self.blocks = BlockManager(
            layout_of(block_size=SIZE),
            num_blocks,
            fences=False,
            prefix_caching=True,
            observers=(self.evictions,),
        )

    def tokens(self, word: str) -> list[int]:
        return [ord(letter) for letter in word for _ in range(SIZE)]

    def hold(self, name: str, word: str) -> dict[str, BlockId]:
        """Compute ``word`` for an owner; return its blocks by prefix."""
        tokens = self.tokens(word)
        run = run_of(tokens, SIZE)
        cached = self.blocks.count_cached_tokens(run)
        owner = owner_of(name)
        self.blocks.admit(owner, tokens=run, num_cached_tokens=cached, num_tokens=len(tokens))
        self.blocks.settle(owner, len(tokens))
        return dict(
            zip(
                [word[: at + 1] for at in range(len(word))], ids_of(self.blocks, owner), strict=True
            )
        )

    def keep(self, word: str) -> dict[str, BlockId]:
        """Compute ``word`` and let it go into the cache."""
        blocks = self.hold(word, word)
        self.blocks.release(owner_of(word))
        return blocks

    def take(self, count: int, name: str = "taker") -> None:
        """Allocate ``count`` blocks."""
        admit_new(self.blocks, name, count * SIZE)

    def count_cached(self, word: str) -> int:
        """Blocks of ``word`` that can be hit."""
        return self.blocks.count_cached_tokens(run_of(self.tokens(word), SIZE)) // SIZE


@pytest.fixture
def cache(request: pytest.FixtureRequest) -> Iterator[Cache]:
    made = Cache(getattr(request, "param", 3))
    yield made
    made.blocks.check_invariants()


def pool_of(num_blocks: int) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("cache", [num_blocks], indirect=True)


@pool_of(3)
def test_e01_a_chain_goes_from_its_end_in_one_batch(cache: Cache) -> None:
    at = cache.keep("abc")
    cache.take(2)
    assert cache.evictions.batches == [[at["abc"], at["ab"]]]
    assert cache.count_cached("abc") == 1
    # And what is left is the only leaf
    cache.take(1, "another")
    assert cache.evictions.block_ids[2:] == [at["a"]]


@pool_of(5)
def test_e01_a_chain_of_nodes_goes_from_its_end(cache: Cache) -> None:
    # Given a chain whose every block is a node of its own: each had another child once
    at = cache.keep("abc")
    cache.keep("ax")
    cache.keep("aby")
    cache.hold("user", "abc")
    cache.take(2)
    cache.blocks.release(owner_of("user"))
    cache.take(2, "another")
    assert cache.evictions.block_ids[2:] == [at["abc"], at["ab"]]


@pool_of(3)
def test_e02_a_parent_goes_once_behind_its_last_child(cache: Cache) -> None:
    at = cache.keep("ab") | cache.keep("ac")
    cache.take(3)
    assert cache.evictions.batches == [[at["ab"], at["ac"], at["a"]]]
    assert cache.blocks.stats.eviction_batches == 1


@pool_of(3)
def test_e03_a_parent_in_use_stays_and_goes_once_when_its_user_has_left(cache: Cache) -> None:
    at = cache.keep("ab") | cache.keep("ac")
    cache.hold("user", "a")
    cache.take(2)
    assert cache.evictions.block_ids == [at["ab"], at["ac"]]
    with pytest.raises(OutOfBlocksError):
        cache.take(1, "too much")
    cache.blocks.release(owner_of("user"))
    cache.take(1, "later")
    assert cache.evictions.block_ids == [at["ab"], at["ac"], at["a"]]


@pool_of(2)
def test_e04_a_leaf_that_was_in_use_is_found_again(cache: Cache) -> None:
    # Given an older leaf in use and a younger one that is not
    first, second = cache.keep("a"), cache.keep("b")
    cache.hold("user", "a")
    cache.take(1)
    assert cache.evictions.block_ids == [second["b"]]
    # Then the older one goes as soon as its user has left
    cache.blocks.release(owner_of("user"))
    cache.take(1, "later")
    assert cache.evictions.block_ids == [second["b"], first["a"]]


@pool_of(5)
def test_e05_nothing_is_taken_and_nothing_lost_where_all_is_in_use(cache: Cache) -> None:
    for word in "abc":
        cache.hold(word, word)
    before = cache.blocks.counts()
    with pytest.raises(OutOfBlocksError):
        cache.take(5)
    assert cache.blocks.counts() == before
    assert cache.evictions.batches == []
    for word in "abc":
        cache.blocks.release(owner_of(word))
    cache.take(5)
    assert len(cache.evictions.block_ids) == 3


@pytest.mark.parametrize("seed", range(8))
def test_e07_exactly_what_is_cached_can_be_evicted_after_any_lives(seed: int) -> None:
    rng = random.Random(seed)
    cache = Cache(16)
    live: list[str] = []
    for number in range(300):
        name = f"R{number}"
        word = "".join(rng.choice("ab") for _ in range(rng.randint(1, 6)))
        try:
            cache.hold(name, word)
        except OutOfBlocksError:
            pass
        else:
            live.append(name)
        while live and rng.random() < 0.5:
            cache.blocks.release(owner_of(live.pop(rng.randrange(len(live)))))
        cache.blocks.check_invariants()
    counts = cache.blocks.counts()
    free = counts[BlockState.FREE] + counts[BlockState.CACHED]
    assert cache.blocks.num_allocatable == free
    cache.take(free)
    assert cache.blocks.counts()[BlockState.CACHED] == 0


@pool_of(6)
def test_e08_a_prefix_and_what_was_kept_for_its_decoding_are_recycled_once(cache: Cache) -> None:
    # Given two owners of a full block each, with two more blocks for tokens to come
    owners = [owner_of(word) for word in "ab"]
    for owner, word in zip(owners, "ab", strict=True):
        run = run_of(cache.tokens(word), SIZE)
        cache.blocks.admit(owner, tokens=run, num_cached_tokens=0, num_tokens=3 * SIZE)
        cache.blocks.settle(owner, SIZE)
    tables = [ids_of(cache.blocks, owner) for owner in owners]
    # When the first ends
    cache.blocks.release(owners[0])
    # Then its reserved blocks are FREE, its full one CACHED, and the other's are as they were
    states = [cache.blocks.state(block_id) for block_id in tables[0]]
    assert states == [BlockState.CACHED, BlockState.FREE, BlockState.FREE]
    assert ids_of(cache.blocks, owners[1]) == tables[1]
    cache.take(3)
    assert cache.evictions.block_ids == [tables[0][0]]
    assert cache.count_cached("a") == 0
    assert cache.count_cached("b") == 1


@pool_of(8)
def test_e09_a_failure_after_detaching_loses_no_block(
    cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given an eviction that fails when two chains have been taken
    for word in ("ab", "cd", "ef", "gh"):
        cache.keep(word)
    take_oldest, calls = PrefixEviction._take_oldest, [0]

    def fails_at_the_third(self: PrefixEviction, *args: Any) -> bool:
        calls[0] += 1
        if calls[0] == 3:
            raise RuntimeError("in the middle")
        return take_oldest(self, *args)

    monkeypatch.setattr(PrefixEviction, "_take_oldest", fails_at_the_third)
    with pytest.raises(RuntimeError):
        cache.take(8)
    monkeypatch.undo()
    # Then what was taken is FREE, the rest still CACHED, and all of it can be had
    counts = cache.blocks.counts()
    assert (counts[BlockState.FREE], counts[BlockState.CACHED]) == (4, 4)
    cache.blocks.check_invariants()
    cache.take(8)


@pool_of(20)
def test_e17_only_what_is_missing_is_evicted(cache: Cache) -> None:
    cache.keep("abcdefghijk")
    cache.take(10)
    assert cache.blocks.stats.evictions == 1


@pool_of(6)
def test_e19_a_second_release_is_refused_and_changes_no_count(cache: Cache) -> None:
    cache.hold("R", "abc")
    shared = cache.hold("S", "abc")
    cache.blocks.release(owner_of("R"))
    before = cache.blocks.counts()
    with pytest.raises(DoubleReleaseError):
        cache.blocks.release(owner_of("R"))
    assert cache.blocks.stats.double_releases == 1
    assert cache.blocks.counts() == before
    assert cache.blocks.state(shared["a"]) is BlockState.ACTIVE
    cache.blocks.release(owner_of("S"))
    assert cache.blocks.counts()[BlockState.CACHED] == 3


def keep_many(cache: Cache, num_words: int) -> None:
    """Cache words of two letters, each a node of its own below one of many parents."""
    for number in range(num_words):
        word = chr(1000 + number // 50) + chr(10_000 + number)
        cache.keep(word)


@pytest.mark.parametrize(
    ("num_words", "count"),
    [(5_000, 500), pytest.param(100_000, 10_000, marks=pytest.mark.slow)],
)
def test_e20_many_nodes_go_in_one_batch(num_words: int, count: int) -> None:
    num_parents = -(-num_words // 50)
    cache = Cache(num_words + num_parents)
    keep_many(cache, num_words)
    assert cache.blocks.counts()[BlockState.FREE] == 0
    cache.take(count)
    assert cache.blocks.stats.eviction_batches == 1
    assert cache.blocks.stats.evictions == count
    assert len(set(cache.evictions.block_ids)) == count
    cache.blocks.check_invariants()


def test_j03_a_leaf_that_is_not_put_back_into_the_order_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The guard switched off: what was skipped because it was in use is never looked at again."""
    cache = Cache(2)
    cache.keep("a")
    cache.hold("user", "a")
    monkeypatch.setattr(PrefixEviction, "became_cached", lambda *_: None)
    cache.blocks.release(owner_of("user"))

    with pytest.raises(AssertionError, match="a leaf is lost"):
        cache.blocks.check_invariants()
