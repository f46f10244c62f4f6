"""A prompt whose KV a tier has is not computed before it is there, nor computed for nothing.

The traps: a step over blocks that a copy still writes; a prompt that waits for ever for a copy
that failed; a queue that stands still behind one that waits for storage.
"""

from collections.abc import Iterator

import pytest

from blockmgr.states import BlockState
from core.config import SchedulerConfig
from core.ids import Attempt, OperationId, RequestId
from core.messages import Prefill
from core.sampling import SamplingParams
from core.tiers import CopyIn, Find
from engine.batch import SampledToken, StepBatch, StepOutput
from prefill.offers import SettledChunk
from prefill.scheduler import PrefillScheduler
from tests.blockmgr.tier_world import SIZE, TierWorld

NUM_BLOCKS = 12


class Bench:
    """A scheduler over a pool with tiers; the test is the device and moves the bytes."""

    def __init__(self) -> None:
        self.world = TierWorld(NUM_BLOCKS, max_staged=8)
        self.scheduler = PrefillScheduler(
            self.world.blocks,
            self.world.layout,
            SchedulerConfig(max_batch_tokens=64, max_num_seqs=2),
            fingerprint="test",
            tiers=self.world.tiers,
        )

    def add(self, name: str, first: int, num_blocks: int, *, first_token: int = 0) -> None:
        self.scheduler.add(
            Prefill(
                request_id=RequestId(name),
                attempt=Attempt(1),
                prompt_token_ids=tuple(range(first, first + num_blocks * SIZE + 1)),
                sampling=SamplingParams(seed=1, max_tokens=5),
                first_token=first_token,
            )
        )

    def serve(self, name: str, first: int, num_blocks: int) -> list[SettledChunk]:
        """Serve one prompt to its end; what was released is in host memory then."""
        self.add(name, first, num_blocks)
        self.answer(Find)
        offers: list[SettledChunk] = []
        while (batch := self.scheduler.schedule()) is not None:
            offers += self.complete(batch)
        self.world.collect()
        self.world.blocks.release((RequestId(name), Attempt(1)))
        self.world.perform_all()
        return offers

    def complete(self, batch: StepBatch) -> list[SettledChunk]:
        tokens = tuple(SampledToken(s.slot, 7) for s in batch.sequences if s.sample)
        return self.scheduler.complete(StepOutput(batch.step, tokens, 0.0))

    def answer(self, kind: type, *, failed: bool = False) -> list[OperationId]:
        """Do all pending actions of ``kind``."""
        self.world.collect()
        operations = [op for op, action in self.world.pending.items() if isinstance(action, kind)]
        for operation in operations:
            self.world.perform(operation, failed=failed)
        return operations


@pytest.fixture
def bench() -> Iterator[Bench]:
    """A pool that has forgotten the prefix of 1000, which host memory has."""
    bench = Bench()
    bench.serve("warm", 1000, 4)
    for at in range(3):
        bench.serve(f"flush-{at}", 100 * at, NUM_BLOCKS - 1)
    yield bench
    bench.scheduler.check_invariants()


def test_a_prompt_is_computed_only_from_where_its_load_ends(bench: Bench) -> None:
    bench.add("R", 1000, 4)
    bench.answer(Find)

    # Given a load under way, nothing is computed
    assert bench.scheduler.schedule() is None
    assert bench.world.blocks.counts()[BlockState.RECEIVING] == 4

    # When it has ended, the last token alone is
    assert len(bench.answer(CopyIn)) == 1
    batch = bench.scheduler.schedule()
    assert batch is not None
    (part,) = batch.sequences
    assert (part.position, part.num_tokens) == (4 * SIZE, 1)
    (offer,) = bench.complete(batch)
    assert offer.num_tokens == 4 * SIZE + 1
    assert offer.prompt.num_cached_tokens == 4 * SIZE
    bench.world.blocks.release(offer.prompt.owner)


def test_after_a_load_that_failed_all_is_computed(bench: Bench) -> None:
    bench.add("R", 1000, 4)
    bench.answer(Find)
    assert bench.scheduler.schedule() is None
    bench.answer(CopyIn, failed=True)

    batch = bench.scheduler.schedule()

    assert batch is not None
    assert (batch.sequences[0].position, batch.sequences[0].num_tokens) == (0, 4 * SIZE + 1)
    (offer,) = bench.complete(batch)
    bench.world.blocks.release(offer.prompt.owner)


def test_a_prompt_that_is_cancelled_while_it_is_loaded_leaves_its_blocks_to_the_copy(
    bench: Bench,
) -> None:
    bench.add("R", 1000, 4)
    bench.answer(Find)
    assert bench.scheduler.schedule() is None

    assert bench.scheduler.cancel((RequestId("R"), Attempt(1)))

    assert bench.world.blocks.counts()[BlockState.QUARANTINED] == 4
    bench.answer(CopyIn)
    assert bench.scheduler.schedule() is None
    assert bench.world.blocks.num_allocatable == NUM_BLOCKS


def test_c19_one_that_waits_for_storage_is_passed_and_then_served(bench: Bench) -> None:
    # Given a prompt whose look-up has no answer yet, before another one
    bench.add("slow", 5000, 2)
    bench.world.collect()
    (find,) = bench.world.pending
    bench.add("next", 6000, 2)
    bench.world.collect()
    (_, second) = bench.world.pending
    bench.world.perform(second)

    # Then the other one is computed
    batch = bench.scheduler.schedule()
    assert batch is not None
    assert batch.sequences[0].token_ids == tuple(range(6000, 6000 + 2 * SIZE + 1))
    bench.complete(batch)
    assert bench.scheduler.schedule() is None
    assert bench.scheduler.num_waiting == 1

    # And the first one as soon as the look-up has ended, whatever it found
    bench.world.perform(find, failed=True)
    batch = bench.scheduler.schedule()
    assert batch is not None
    assert batch.sequences[0].token_ids == tuple(range(5000, 5000 + 2 * SIZE + 1))
    bench.complete(batch)
    for name in ("slow", "next"):
        bench.world.blocks.release((RequestId(name), Attempt(1)))


def test_c19_one_with_a_prefix_pinned_at_its_reader_is_looked_for_and_not_passed(
    bench: Bench,
) -> None:
    # Given one that nobody waits for, and one whose reader keeps memory for it
    bench.add("free", 4000, 2)
    bench.add("pinned", 5000, 2, first_token=SIZE)
    bench.add("next", 6000, 2)
    bench.world.collect()
    free, pinned, following = bench.world.pending
    assert isinstance(bench.world.pending[pinned], Find)
    bench.world.perform(following)

    # While storage is asked for it, it passes, and is not passed
    assert bench.scheduler.schedule() is None
    assert bench.scheduler.num_waiting == 3

    # When storage has answered, whatever that was, both go on
    bench.world.perform(pinned, failed=True)
    batch = bench.scheduler.schedule()
    assert batch is not None
    assert [part.token_ids[0] for part in batch.sequences] == [5000, 6000]
    bench.complete(batch)
    bench.world.perform(free)
    batch = bench.scheduler.schedule()
    assert batch is not None
    bench.complete(batch)
    for name in ("free", "pinned", "next"):
        bench.world.blocks.release((RequestId(name), Attempt(1)))


def test_no_more_prompts_are_loaded_than_can_run(bench: Bench) -> None:
    for at in range(3):
        bench.add(f"R{at}", 1000, 2)
    bench.answer(Find)

    assert bench.scheduler.schedule() is None

    assert bench.scheduler.num_running == 2
    assert bench.scheduler.num_waiting == 1
    for at in range(3):
        bench.scheduler.cancel((RequestId(f"R{at}"), Attempt(1)))
    bench.answer(CopyIn)
