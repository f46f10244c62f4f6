"""A sequence that a tier has KV of runs from where its load ends, and is never stuck in it.

Preemption sends KV down, so what was preempted comes up again instead of being computed anew. The
traps: a step over blocks that a copy still writes, and a copy that frees what a later life owns.
"""

from collections.abc import Iterator

import pytest

from blockmgr.states import BlockState
from core.config import SchedulerConfig
from core.ids import Attempt, Owner, RequestId
from core.sampling import SamplingParams
from core.tiers import CopyIn, CopyOut, Find
from decode.scheduler import DecodeScheduler
from decode.sequence import Progress, Sequence
from decode.state import State
from engine.batch import SampledToken, StepBatch, StepOutput
from tests.blockmgr.tier_world import SIZE, TierWorld

NUM_BLOCKS = 12


def owner_of(name: str) -> Owner:
    return RequestId(name), Attempt(1)


class Bench:
    """A scheduler over a pool with tiers; the test is the device and moves the bytes."""

    def __init__(self) -> None:
        self.world = TierWorld(NUM_BLOCKS, max_staged=8)
        self.scheduler = DecodeScheduler(
            self.world.blocks,
            self.world.layout,
            SchedulerConfig(max_batch_tokens=64, max_num_seqs=4, reserve_blocks_min=0),
            fingerprint="test",
            tiers=self.world.tiers,
        )

    def add(self, name: str, first: int, num_tokens: int, *, max_tokens: int = 3) -> Sequence:
        sequence = Sequence(
            owner=owner_of(name),
            prompt_token_ids=tuple(range(first, first + num_tokens)),
            sampling=SamplingParams(seed=1, max_tokens=max_tokens),
        )
        self.scheduler.add(sequence, remote=False)
        self.answer(Find)
        return sequence

    def complete(self, batch: StepBatch) -> list[Progress]:
        tokens = tuple(SampledToken(s.slot, 7) for s in batch.sequences if s.sample)
        progress = self.scheduler.complete(StepOutput(batch.step, tokens, 0.0))
        self.world.collect()
        return progress

    def run(self) -> None:
        """Run until nothing is left to do, bytes moved in between."""
        while True:
            batch = self.scheduler.schedule()
            self.world.collect()
            if batch is not None:
                self.complete(batch)
            elif self.world.pending:
                self.world.perform_all()
            else:
                return

    def answer(self, kind: type, *, failed: bool = False) -> int:
        """Do all pending actions of ``kind``; return how many."""
        self.world.collect()
        operations = [op for op, action in self.world.pending.items() if isinstance(action, kind)]
        for operation in operations:
            self.world.perform(operation, failed=failed)
        return len(operations)


@pytest.fixture
def bench() -> Iterator[Bench]:
    """A pool that has forgotten the prefix of 1000, which host memory has."""
    bench = Bench()
    for name, first, num_blocks in (("warm", 1000, 4), ("flush", 100, 10), ("flush-2", 200, 10)):
        bench.add(name, first, num_blocks * SIZE + 1)
        bench.run()
    yield bench
    bench.scheduler.check_invariants()


def test_a_sequence_is_computed_only_from_where_its_load_ends(bench: Bench) -> None:
    sequence = bench.add("R", 1000, 4 * SIZE + 3)
    assert bench.scheduler.num_uncached_tokens(sequence) == 3

    # Given a load under way, nothing runs
    assert bench.scheduler.schedule() is None
    assert sequence.state is State.LOADING

    # When it has ended, the rest of the prompt does
    assert bench.answer(CopyIn) == 1
    batch = bench.scheduler.schedule()
    assert batch is not None
    (part,) = batch.sequences
    assert (part.position, part.num_tokens) == (4 * SIZE, 3)
    assert sequence.num_cached_tokens == 4 * SIZE
    bench.complete(batch)
    bench.run()


def test_after_a_load_that_failed_all_is_computed(bench: Bench) -> None:
    sequence = bench.add("R", 1000, 4 * SIZE + 3)
    assert bench.scheduler.schedule() is None
    bench.answer(CopyIn, failed=True)

    batch = bench.scheduler.schedule()

    assert batch is not None
    assert (batch.sequences[0].position, batch.sequences[0].num_tokens) == (0, 4 * SIZE + 3)
    assert sequence.num_cached_tokens == 0
    bench.complete(batch)
    bench.run()


def test_c01_abort_while_loading_releases_now_and_frees_when_the_copy_has_ended(
    bench: Bench,
) -> None:
    bench.add("R", 1000, 4 * SIZE + 3)
    assert bench.scheduler.schedule() is None

    assert not bench.scheduler.abort(owner_of("R"))

    assert bench.scheduler.get(owner_of("R")) is None
    assert bench.world.count(BlockState.QUARANTINED) == 4
    # And its name may come again meanwhile
    again = bench.add("R", 1000, 4 * SIZE + 3)
    assert bench.scheduler.schedule() is None
    assert again.state is State.LOADING
    bench.answer(CopyIn)
    bench.run()
    assert bench.world.blocks.num_allocatable == NUM_BLOCKS


def test_e16_what_was_preempted_is_stored_and_comes_back_without_computing(bench: Bench) -> None:
    # Given two that outgrow the pool together
    old = bench.add("old", 3000, 4 * SIZE, max_tokens=20)
    young = bench.add("young", 4000, 4 * SIZE, max_tokens=20)
    while not bench.scheduler.num_preemptions:
        batch = bench.scheduler.schedule()
        if batch is not None:
            bench.complete(batch)

    # When the young one has lost its blocks
    assert young.state is State.WAITING
    assert bench.answer(CopyOut) >= 1
    bench.run()

    # Then it went on from where it was, by a load or what the pool still had
    assert [len(s.output_token_ids) for s in (old, young)] == [20, 20]
    assert bench.world.book.stats.loads["done"] > 0
    assert bench.world.blocks.num_allocatable == NUM_BLOCKS


def test_a15_a_load_under_way_is_waited_for_rather_than_giving_up_oneself(bench: Bench) -> None:
    """What is being loaded can be preempted soon; whoever runs has more to lose."""
    running = bench.add("running", 3000, 4 * SIZE - 1, max_tokens=12)
    batch = bench.scheduler.schedule()
    assert batch is not None
    bench.complete(batch)
    loading = bench.add("loading", 1000, 4 * SIZE + 4 * SIZE - 4, max_tokens=3)
    while loading.state is not State.LOADING:
        batch = bench.scheduler.schedule()
        assert batch is not None
        bench.complete(batch)
    while (batch := bench.scheduler.schedule()) is not None:
        bench.complete(batch)

    assert running.num_preemptions == 0
    assert loading.state is State.LOADING
    bench.answer(CopyIn)
    bench.run()
    assert len(running.output_token_ids) == 12
    assert len(loading.output_token_ids) == 3


def test_c19_one_that_waits_for_storage_is_passed(bench: Bench) -> None:
    slow = Sequence(
        owner=owner_of("slow"),
        prompt_token_ids=tuple(range(5000, 5000 + 2 * SIZE + 1)),
        sampling=SamplingParams(seed=1, max_tokens=1),
    )
    bench.scheduler.add(slow, remote=False)
    bench.world.collect()
    (find,) = bench.world.pending
    following = Sequence(
        owner=owner_of("next"),
        prompt_token_ids=tuple(range(6000, 6000 + 2 * SIZE + 1)),
        sampling=SamplingParams(seed=1, max_tokens=1),
    )
    bench.scheduler.add(following, remote=False)
    bench.world.collect()
    bench.world.perform(list(bench.world.pending)[-1])

    batch = bench.scheduler.schedule()
    assert batch is not None
    assert following.state is State.RUNNING
    assert slow.state is State.WAITING
    bench.complete(batch)
    bench.world.perform(find, failed=True)
    bench.run()
    assert slow.state is State.GONE
