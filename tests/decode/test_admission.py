"""Who is admitted under memory pressure, and that a refusal changes nothing.

The failure guarded: a newcomer is matched, pinned, found too large and dropped, in every step anew;
or it is let in and takes the blocks that running sequences need to go on.
"""

import pytest

from blockmgr.block_manager import BlockManager
from blockmgr.receive_target import ReceiveTarget
from blockmgr.states import BlockState
from core.errors import OutOfBlocksError
from core.ids import BlockId, OperationId
from decode.sequence import Sequence
from decode.state import State
from tests.decode.bench import Bench

LOOKUPS = ("count_cached_tokens", "admission_cost", "admit")


def run_out(b: Bench, *, limit: int = 2000) -> None:
    """Run steps, one at a time, until nothing is left to do."""
    for _ in range(limit):
        if (batch := b.scheduler.schedule()) is None:
            return
        b.complete(batch)
    pytest.fail(f"still running after {limit} steps")


def watch_lookups(b: Bench, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that grows by each question that the scheduler asks about a prefix."""
    calls: list[str] = []
    for name in LOOKUPS:
        original = getattr(b.blocks, name)

        def watched(
            *args: object, name: str = name, original: object = original, **options: object
        ) -> object:
            calls.append(name)
            return original(*args, **options)  # type: ignore[operator]

        monkeypatch.setattr(b.blocks, name, watched)
    return calls


def snapshot(b: Bench) -> tuple[object, ...]:
    """What a refused admission must leave as it was."""
    ids = [BlockId(at) for at in range(b.blocks.num_blocks)]
    stats = b.blocks.stats
    return (
        [(b.blocks.state(at), b.blocks.generation(at)) for at in ids],
        (stats.query_tokens, stats.hit_tokens, stats.evictions, stats.allocation_failures),
        b.blocks.owners,
    )


def crowd(b: Bench, num_running: int, *, max_tokens: int = 100) -> list[Sequence]:
    """Put sequences of 15 tokens into the batch: a block each, and one more in two steps."""
    made = [
        b.add(f"running{at}", 15, max_tokens=max_tokens, first=10_000 * (at + 1))
        for at in range(num_running)
    ]
    b.complete(b.step())
    return made


def test_f03_refused_before_anything_is_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    # Given 20 free blocks beside 4 running sequences, each with a reserve of 16
    b = Bench(24, prefix_caching=True, reserve_blocks_min=0, reserve_blocks_initial=16)
    crowd(b, 4)
    b.scheduler._budget.count_preemption()
    assert b.num_free == 20
    newcomer = b.add("newcomer", 160)
    calls, before = watch_lookups(b, monkeypatch), snapshot(b)
    # When a step is scheduled
    b.complete(b.step())
    # Then the newcomer, which 20 blocks would hold, has not been looked up, and nothing moved
    assert newcomer.state is State.WAITING
    assert calls == []
    assert snapshot(b) == before
    # And when the others are gone, it comes in
    for at in range(4):
        b.scheduler.abort(b.owner(f"running{at}"))
    b.complete(b.step())
    assert newcomer.state is State.RUNNING


def test_f03_a_refused_hit_keeps_the_order_of_eviction() -> None:
    # Given two pools with the same two cached prompts
    asked, unasked = (Bench(14, prefix_caching=True, reserve_blocks_min=0) for _ in range(2))
    for b in (asked, unasked):
        for at in range(2):
            b.add(f"cached{at}", 64, max_tokens=1, first=1000 * at)
            b.complete(b.step())
        b.add("running", 17, max_tokens=9, first=7000)
        b.complete(b.step())
    # When a newcomer that would hit the older one is refused by one of them, again and again
    newcomer = asked.add("newcomer", 13 * 16 - 1, max_tokens=1)
    for _ in range(4):
        asked.complete(asked.step())
        unasked.complete(unasked.step())
    assert asked.scheduler.num_uncached_tokens(newcomer) == 13 * 16 - 1 - 64
    assert newcomer.state is State.WAITING
    asked.scheduler.abort(newcomer.owner)
    # Then both evict in the same order
    assert take_all(asked) == take_all(unasked)


def take_all(b: Bench) -> list[int]:
    """Take every block, one by one; return the ids in the order in which they came."""
    b.scheduler.abort(b.owner("running"))
    taker = b.add("taker", 16 * 14 - 1, remote=True, max_tokens=1, first=50_000)
    taken: list[int] = []
    for at in range(14):
        placed = b.scheduler.receive(taker.owner, [ReceiveTarget(0, at, 1)], OperationId(at))
        assert placed is not None
        taken += [block_id for block_id, _ in placed[0]]
        b.blocks.end_operation(OperationId(at))
    return taken


class FailsOnce(BlockManager):
    """An admission that fails in the middle, as one whose tier raises does."""

    has_failed = False

    def admit(self, *args: object, **options: object) -> None:
        if not self.has_failed:
            self.has_failed = True
            raise OutOfBlocksError(requested=1, free=0, withheld=0)
        super().admit(*args, **options)  # type: ignore[arg-type]


def test_f05_a_failed_match_leaves_no_trace_and_a_retry_is_as_the_first_try() -> None:
    b, untouched = Bench(10, prefix_caching=True), Bench(10, prefix_caching=True)
    for made in (b, untouched):
        made.add("cached", 64, max_tokens=1)
        made.complete(made.step())
        made.add("R", 80, max_tokens=4)
    b.blocks.__class__ = FailsOnce
    before = snapshot(b)

    with pytest.raises(OutOfBlocksError):
        b.scheduler.schedule()

    assert snapshot(b) == before
    b.scheduler.check_invariants()
    first, retried = untouched.step(), b.step()
    assert [part.position for part in retried.sequences] == [64]
    tables = [step.sequences[0].block_tables[0].tolist() for step in (first, retried)]
    assert tables[0] == tables[1]
    assert snapshot(b)[0] == snapshot(untouched)[0]
    for made, step in ((b, retried), (untouched, first)):
        made.complete(step)


def test_f06_a_newcomer_is_not_admitted_and_dropped_in_a_loop() -> None:
    # Given relaxed admission, and running sequences that will need the whole pool
    b = Bench(16, prefix_caching=True, reserve_blocks_min=0)
    running = crowd(b, 3, max_tokens=75)
    b.complete(b.step())
    newcomer = b.add("newcomer", 150, max_tokens=60, first=77_000)
    # When the newcomer takes what is free
    b.complete(b.step())
    assert newcomer.state is State.RUNNING
    run_out(b)
    # Then everybody has ended, and the newcomer was admitted again only when it could stay
    assert {s.state for s in [*running, newcomer]} == {State.GONE}
    assert newcomer.num_preemptions == 1
    assert all(len(s.output_token_ids) == 75 for s in running)


@pytest.mark.parametrize("minimum", [0, 1])
def test_f06_overload_ends_with_few_preemptions(minimum: int) -> None:
    # Given many sequences, of which the pool holds three at their full length
    b = Bench(12, prefix_caching=True, reserve_blocks_min=minimum)
    everyone = [b.add(f"R{at}", 17, max_tokens=40, first=1000 * at) for at in range(20)]

    run_out(b)

    assert all(len(s.output_token_ids) == 40 for s in everyone)
    assert b.scheduler.num_preemptions <= len(everyone)
    assert b.blocks.num_allocatable == 12


def test_f07_withheld_blocks_are_not_free() -> None:
    # Given 30 of 40 blocks that are FENCED or QUARANTINED
    b = Bench(40)
    fenced = b.add("fenced", 240, max_tokens=2)
    step = b.step()
    b.scheduler.abort(fenced.owner)
    read = b.add("quarantined", 240, remote=True, max_tokens=2)
    assert b.scheduler.receive(read.owner, [ReceiveTarget(0, 0, 15)], OperationId(1))
    b.scheduler.abort(read.owner)
    counts = b.blocks.counts()
    assert (counts[BlockState.FENCED], counts[BlockState.QUARANTINED]) == (15, 15)
    # Then a newcomer of 11 blocks waits, local or remote
    local = b.add("local", 176, max_tokens=1)
    assert b.scheduler.schedule() is None
    remote = b.add("remote", 176, remote=True, max_tokens=1)
    target = [ReceiveTarget(0, 0, 11)]
    assert b.scheduler.receive(remote.owner, target, OperationId(2)) is None
    # And fits when one of the two has passed
    b.blocks.end_operation(OperationId(1))
    b.scheduler.abort(remote.owner)
    b.complete(b.step())
    assert local.state is State.GONE
    b.complete(step)
    assert b.num_free == 40


def test_f08_preemption_keeps_newcomers_out_until_the_reserve_has_decayed() -> None:
    # Given two sequences that outgrow the pool, and a newcomer
    b = Bench(8, reserve_blocks_min=0, reserve_blocks_initial=4, reserve_decay_steps=2)
    old = b.add("old", 47, max_tokens=60)
    young = b.add("young", 63, max_tokens=4, first=1000)
    b.complete(b.step())
    while not b.scheduler.num_preemptions:
        b.complete(b.step())
    assert young.state is State.WAITING
    assert b.scheduler._budget.reserve_blocks == 4
    # When steps pass
    waited = 0
    while young.state is State.WAITING and old.state is State.RUNNING:
        b.complete(b.step())
        waited += 1
    # Then it was let in while old still ran, once the reserve had decayed
    assert waited > 2
    run_out(b)
    assert {old.state, young.state} == {State.GONE}


def test_c17_what_is_being_received_counts_as_running() -> None:
    # Given a reserve of one block, and a sequence that will have all but one block
    b = Bench(6)
    first = b.add("first", 80, remote=True, max_tokens=2)
    assert b.scheduler.receive(first.owner, [ReceiveTarget(0, 0, 2)], OperationId(1))
    # Then the last block stays back for its first decode token
    assert b.add("second", 16, max_tokens=2).state is State.WAITING
    assert b.scheduler.schedule() is None
    b.scheduler.abort(first.owner)
    b.blocks.end_operation(OperationId(1))
    b.complete(b.step())
