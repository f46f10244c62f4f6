"""KV that does not come must be computed, from what is certain, or the request told to have failed.

What has landed of a failed receive may be stale, damaged or half there: a request that goes on
from it answers 200 with the wrong text. A read that is still in progress may write for a while
yet, into blocks that must not be given to the same request again.
"""

from collections.abc import Callable, Iterator

import pytest
from prometheus_client import CollectorRegistry

from blockmgr.receive_target import ReceiveTarget
from blockmgr.states import BlockState
from core.errors import RequestError
from core.ids import Attempt, OperationId, RequestId, WorkerId
from core.sampling import SamplingParams
from decode.delivery import Loss
from decode.load_failure import LoadFailures, Policy
from decode.sequence import Sequence
from decode.state import State
from engine.batch import SequenceInput, StepBatch
from tests.decode.bench import STOP, Bench

READ = OperationId(1)


@pytest.fixture
def bench() -> Iterator[Callable[..., Bench]]:
    """Makes benches, and checks the invariants of each at the end."""
    benches: list[Bench] = []

    def make(num_blocks: int, **config: int) -> Bench:
        benches.append(Bench(num_blocks, prefix_caching=True, **config))
        return benches[-1]

    yield make
    for made in benches:
        made.scheduler.check_invariants()


def share_prefix(b: Bench, num_tokens: int) -> None:
    """Leave the first ``num_tokens`` positions of any prompt in the cache."""
    b.add("before", num_tokens + 1)
    b.complete(b.step(), STOP)


def receive(b: Bench, sequence: Sequence, first_index: int, count: int) -> list[int]:
    """Begin the read of a ticket's blocks; return them."""
    target = ReceiveTarget(group=0, first_index=first_index, count=count)
    placed = b.scheduler.receive(sequence.owner, [target], READ)
    assert placed is not None
    return [block_id for block_id, _ in placed[0]]


def part_of(batch: StepBatch) -> SequenceInput:
    (part,) = batch.sequences
    return part


def test_c23_what_was_received_is_dropped_and_the_cached_prefix_is_kept(
    bench: Callable[..., Bench],
) -> None:
    # Given a prompt of 5 blocks, of which 2 were found here and 2 have landed
    b = bench(16)
    share_prefix(b, 32)
    sequence = b.add("R", 70, remote=True)
    assert sequence.num_computed == 32
    receive(b, sequence, 2, 2)
    b.blocks.end_operation(READ)
    # When the rest does not come
    b.scheduler.recompute(sequence.owner)
    # Then it is computed here from behind the prefix on, landed blocks included
    part = part_of(b.step())
    assert (part.position, len(part.token_ids), part.sample) == (32, 38, True)
    assert sequence.num_cached_tokens == 32


def test_c20_blocks_of_a_read_in_progress_are_not_computed_into(
    bench: Callable[..., Bench],
) -> None:
    # Given a receive whose read is not over
    b = bench(16)
    sequence = b.add("R", 70, remote=True)
    reading = receive(b, sequence, 0, 4)
    # When its source is lost
    b.scheduler.recompute(sequence.owner)
    # Then its blocks are quarantined, and it gets others
    assert b.blocks.counts()[BlockState.QUARANTINED] == 4
    part = part_of(b.step())
    assert part.position == 0
    assert not set(reading) & set(part.block_tables[0].tolist())
    # And the end of the read, whatever it is, changes nothing for the request
    b.blocks.end_operation(READ)
    assert b.blocks.counts()[BlockState.QUARANTINED] == 0
    assert sequence.state is State.RUNNING


def test_c09_nothing_of_a_failed_receive_can_be_hit(bench: Callable[..., Bench]) -> None:
    b = bench(16)
    sequence = b.add("R", 70, remote=True)
    receive(b, sequence, 0, 4)
    b.blocks.end_operation(READ)
    b.scheduler.recompute(sequence.owner)
    assert part_of(b.step()).position == 0
    other = b.add("other", 70, remote=True)
    assert other.num_computed == 0


def test_c23_a_request_that_is_recomputed_goes_before_newcomers(
    bench: Callable[..., Bench],
) -> None:
    b = bench(32, max_num_seqs=1)
    remote = b.add("remote", 40, remote=True)
    b.add("newcomer", 40, first=500)
    b.scheduler.recompute(remote.owner)
    assert part_of(b.step()).token_ids[0] == 0


def test_c17_a_request_that_is_recomputed_passes_no_preempted_one(
    bench: Callable[..., Bench],
) -> None:
    # Given a sequence that had to give its blocks up, and waits
    b = bench(8, reserve_blocks_min=0)
    remote = b.add("remote", 16, remote=True)
    old = b.add("old", 50, max_tokens=60, first=100)
    young = b.add("young", 50, max_tokens=60, first=200)
    while not young.num_preemptions:
        b.complete(b.step())
    # When another one must be computed here
    b.scheduler.recompute(remote.owner)
    # Then the preempted one is still the first, so that no ticket takes its memory
    assert b.scheduler._table.is_preempted_one_waiting
    b.scheduler.abort(old.owner)
    assert b.step().sequences[0].token_ids[0] >= 200


def test_c23_a_recomputed_request_needs_no_promise_any_more(bench: Callable[..., Bench]) -> None:
    b = bench(16)
    remote = b.add("remote", 200, remote=True, max_tokens=2)
    receive(b, remote, 0, 1)
    assert b.scheduler._budget.promised == 12
    b.scheduler.recompute(remote.owner)
    assert b.scheduler._budget.promised == 0
    b.scheduler.abort(remote.owner)
    b.blocks.end_operation(READ)
    assert b.num_free == 16


@pytest.mark.parametrize(
    ("policy", "kind", "peer", "recomputed"),
    [
        ("recompute", "transfer", None, True),
        ("recompute", "internal", "prefill-0", True),
        ("recompute", "internal", None, False),
        ("fail", "transfer", "prefill-0", False),
    ],
)
def test_c23_the_policy_decides_and_is_counted(
    policy: Policy, kind: str, peer: WorkerId | None, *, recomputed: bool
) -> None:
    registry = CollectorRegistry()
    failures = LoadFailures(policy, registry)
    loss = Loss(Bench(1).owner("R"), "gone", kind, peer)  # type: ignore[arg-type]
    assert failures.is_recomputed(loss) is recomputed
    name = "sluice_kv_load_failures_total"
    assert registry.get_sample_value(name, {"policy": "recompute"}) == recomputed
    assert registry.get_sample_value(name, {"policy": "fail"}) == (not recomputed)


def test_continued_request_without_a_prompt_is_refused(bench: Callable[..., Bench]) -> None:
    """It would end the step that it is in, and the worker with it."""
    sequence = Sequence(
        owner=(RequestId("R"), Attempt(2)),
        prompt_token_ids=(),
        sampling=SamplingParams(seed=1, max_tokens=9),
        output_token_ids=[1, 2],
    )
    with pytest.raises(RequestError, match="prompt is empty"):
        bench(4).scheduler.add(sequence, remote=False)
